"""The door to AOTAutograd's export: a module as its joint graph, whose nodes know where they come from.

Dynamo tells of each node which module and which lines of the program made it. The export runs the module as
it is, and tells nothing: so the Python frames that are there when a node is made are looked at. Those of the
backward have none; a node of it gets the place of the forward's node with the same number of autograd's.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

from fxremat._torch import patches
from fxremat._torch.compilers import compile_lock

__all__ = ["export_joint"]

# Whose frames are none of the program's: torch's, our own, and code that has no file.
_NOT_THE_PROGRAMS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")


@contextlib.contextmanager
def export_joint(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], decompose: bool, named: nn.Module
) -> Any:
    """Yield ``(joint graph module, number of forward outputs)`` traced from a module.

    A model that asks is told that it is being compiled: what it does otherwise may need numbers. Modules are
    called as ``named`` calls them, which is the model or a part of it.
    """
    import torch._inductor.lowering  # noqa: F401 (the decomposition of pooling refers to it)
    from torch._inductor.decomposition import select_decomp_table

    table = select_decomp_table() if decompose else None
    with compile_lock, contextlib.ExitStack() as stack:
        with _is_compiling(), _placing(named, sys._getframe()):
            joint = aot_export_joint_with_descriptors(
                stack,
                model,
                args,
                kwargs,
                decompositions=table,
                keep_inference_input_mutations=True,  # as in a compiled graph
            )
        _place_backward(joint.graph_module.graph)
        metadata = joint._aot_state.fw_metadata
        yield joint.graph_module, metadata.num_forward


@contextlib.contextmanager
def _is_compiling() -> Iterator[None]:
    """Have ``torch.compiler.is_compiling()`` be true."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def _placing(named: nn.Module, outermost: FrameType) -> Iterator[None]:
    """Have each node know its modules and the lines of the program, as one that Dynamo has traced."""
    paths = {id(module): path for path, module in named.named_modules() if path}

    def place(node: fx.Node) -> None:
        lines, modules = _frames(sys._getframe(), outermost, paths)
        if lines:
            node.stack_trace = "".join(lines)
        if modules:
            node.meta["nn_module_stack"] = modules

    with patches.seeing_nodes(place):
        yield


def _frames(
    frame: FrameType | None, outermost: FrameType, paths: Mapping[int, str]
) -> tuple[list[str], dict[str, tuple[str, type]]]:
    """The lines of the program, and the modules whose methods run; both outermost first."""
    lines, modules = [], []
    while frame is not None and frame is not outermost:
        code = frame.f_code
        if not code.co_filename.startswith(_NOT_THE_PROGRAMS):
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n')
        if code.co_varnames[:1] == ("self",):
            module = frame.f_locals.get("self")
            if id(module) in paths:
                modules.append((paths[id(module)], type(module)))
        frame = frame.f_back
    return lines[::-1], {path: (path, kind) for path, kind in reversed(modules)}


def _place_backward(graph: fx.Graph) -> None:
    """Give the nodes of the backward the lines of the forward's node that they belong to."""
    lines: dict[int, str] = {}
    for node in graph.nodes:
        number = node.meta.get("seq_nr")
        if number is None:
            continue
        if node.stack_trace:
            lines.setdefault(number, node.stack_trace)
        elif number in lines:
            node.stack_trace = lines[number]
