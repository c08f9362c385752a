"""The door to torch's logs: the one of ``TORCH_LOGS``, and the structured one of ``TORCH_TRACE``.

``TORCH_LOGS="fxremat"`` and ``"+fxremat"`` show the loggers below ``fxremat``. The variable is read while
torch is imported, when ours is not registered yet: torch takes the name for a package's then, which comes to
the same.
For ``TORCH_TRACE``, which names a folder, there are files that tlparse shows.
"""

from __future__ import annotations

from collections.abc import Callable

from torch._logging import _internal, trace_structured

_internal.register_log("fxremat", "fxremat")

TEXT, JSON = "string", "json"  # the encodings of artifacts that tlparse knows


def log_artifact(name: str, encoding: str, content: Callable[[], str]) -> None:
    """Log a file of the compilation that is under way; ``content`` is not called where nothing is logged."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=content,
        expect_trace_id=False,
    )
