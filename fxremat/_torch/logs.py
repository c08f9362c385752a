"""torch's structured log, which ``TORCH_TRACE`` names a folder for, and which tlparse reads."""

from __future__ import annotations

from collections.abc import Callable

from torch._logging import trace_structured

TEXT, JSON = "string", "json"  # the encodings of artifacts that tlparse knows


def log_artifact(name: str, encoding: str, content: Callable[[], str]) -> None:
    """Log a file of the compilation that is under way; ``content`` is not called where nothing is logged."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=content,
        expect_trace_id=False,
    )
