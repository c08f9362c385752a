"""Frames: where in the user's program a graph is compiled.

A graph that is compiled while the forward of a module runs is a part of that: of a model whose blocks are
compiled one by one, or whose forward breaks into several graphs. One that is compiled outside of any is the
whole model, as a rule, or its first part.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

# Modules that wrap a whole model; a container such as nn.Sequential does not.
_WRAPPERS = tuple(
    f"{Path(torch.__file__).parent / folder}{os.sep}" for folder in ("_dynamo", "distributed", "nn/parallel")
)


def is_inside_of_module() -> bool:
    """Whether the forward of a module is running, but for one that wraps a whole model."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_forward = code.co_name == "forward" and not code.co_filename.startswith(_WRAPPERS)
        if is_forward and isinstance(frame.f_locals.get(next(iter(code.co_varnames), "")), nn.Module):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
