"""The device of the tests in this folder: a GPU, and at reduced size the CPU: no test waits for a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(
    params=[
        pytest.param("cpu", id="cpu, reduced size"),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where networks are trained, in full float32 and by deterministic kernels where there are any."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield request.param
    torch.use_deterministic_algorithms(False)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
