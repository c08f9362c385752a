"""Views: operators that look at memory as it lies, in graphs that run as they are.

A graph is traced with layouts that kernels do not always keep: PyTorch's tracing takes the gradient of a
dropout for one that lies as its mask does, while the kernel's lies as the gradient that it reads. A ``view``
that was right when traced then refuses what it gets. ``reshape`` is the same view where the layout allows
one, and a copy elsewhere.
"""

from __future__ import annotations

from torch import fx

from fxremat.graph.ops import aten

_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})


def let_views_copy(module: fx.GraphModule) -> None:
    """Have the views of a graph copy what does not lie as it was traced."""
    for node in module.graph.nodes:
        if node.target in _VIEWS:
            node.target = aten.reshape.default
    module.recompile()
