"""Contents: operands that are read for their sizes alone, and need not be kept.

The gradients of average pooling take what was pooled, for its sizes: no element of it counts. Autograd saves
it all the same, and Inductor's code holds until its end what is saved and never read. Such an operand gives
way to zeros, which Inductor never stores.
"""

from __future__ import annotations

import torch
from torch import fx

from fxremat.graph import ops

_SIZES_OF = 1  # the place of the operand of which only the sizes are read
_READ_SIZES = frozenset({ops.aten.avg_pool2d_backward, ops.aten.avg_pool3d_backward})


def forget_contents(module: fx.GraphModule) -> None:
    """Put zeros in the place of operands that are read for their sizes alone, where these are plain numbers.

    For compilers that keep constants in registers: elsewhere the zeros would be written.
    """
    for node in module.graph.nodes:
        if ops.packet(node) not in _READ_SIZES:
            continue
        operand = node.args[_SIZES_OF]
        value = operand.meta["val"]
        if any(isinstance(size, torch.SymInt) for size in value.shape):
            continue
        with module.graph.inserting_before(node):
            settings = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
            zeros = module.graph.call_function(ops.aten.full.default, (list(value.shape), 0), settings)
        zeros.meta["val"] = value.new_zeros(value.shape)
        node.update_arg(_SIZES_OF, zeros)
