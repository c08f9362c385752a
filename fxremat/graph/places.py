"""Places: where in the user's code a node comes from."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from torch import fx

# How a frame of fxremat's own is spelled in a stack trace.
_OURS = f'File "{Path(__file__).parents[1]}{os.sep}'


@dataclass(frozen=True, slots=True)
class Origin:
    """What a node is to its user.

    Attributes:
        name: What schedules call it.
        operator: What computes it; empty in a graph made of mappings.
        module: The user's module that it comes from; empty where the trace does not say.
        source: The user's ``file:line``; empty where the trace does not say.
    """

    name: str
    operator: str = ""
    module: str = ""
    source: str = ""


def source_line(node: fx.Node) -> str:
    """``file:line`` of the innermost frame of the user's program that made the node."""
    trace = node.meta.get("stack_trace") or ""
    lines = map(str.strip, trace.splitlines())
    frames = [line for line in lines if line.startswith("File ") and _OURS not in line]
    if not frames:
        return ""
    file, line, *_ = frames[-1].removeprefix("File ").split(", ")
    return f"{file.strip(chr(34))}:{line.removeprefix('line ')}"


def module_path(node: fx.Node) -> str:
    """The dotted path of the innermost ``nn.Module`` that made the node, as the user spells it."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    if not paths:
        return ""
    return re.sub(r"^[LG]\['\w+'\]\.?", "", str(paths[-1]))  # Dynamo writes the model as L['self']
