"""What is known to be off with some versions of torch."""

from __future__ import annotations

import pytest
import torch


def off_with(*versions: str) -> pytest.MarkDecorator:
    """Mark a test of predicted memory that fails with these versions; the document on limits says so, too."""
    reason = "with this version of torch predictions are off: see the limits"
    return pytest.mark.xfail(torch.__version__.startswith(versions), reason=reason, strict=True)
