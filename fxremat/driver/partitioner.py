"""The partitioner: the object that AOTAutograd and Inductor call to split a joint graph."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fxremat._torch import compilers, partitioners
from fxremat.device import calibrate
from fxremat.driver import journal
from fxremat.driver.compilation import Compilation
from fxremat.driver.policy import Asking
from fxremat.errors import FxrematError, InvalidOptionError
from fxremat.options.options import Options, share_of_device


class Partitioner(partitioners.CustomPartitionerFn):
    """A partition function for AOTAutograd and for Inductor.

    Its state is constant, so that caches which pickle it hit: its options, but for Inductor's own, which
    caches know, ``detect_writes`` and ``verify``, which change no graph, and where they were given; and the
    fingerprint of the graph that it is made for. What becomes of that graph is no part of what is pickled; it
    follows from the graph and the options.

    Attributes:
        policy: How plans are chosen, if not by the options alone.
        compilation: The one that the partitioner belongs to. None for a user's own: each graph that it splits
            is then a compilation by itself.
    """

    def __init__(
        self, options: Options, fingerprint: str = "", compilation: Compilation | None = None
    ) -> None:
        cost = options.cost if isinstance(options.cost, str) else dict(sorted(options.cost.items()))
        self.options = replace(options, inductor={}, cost=cost, detect_writes=False, verify=0, sources={})
        self.fingerprint = fingerprint
        self.policy = "" if compilation is None else repr(compilation.policy)
        self.compilation = compilation

    def key(self) -> str | None:
        """A short text for what ``uuid`` is; None where that is nothing."""
        found = self.uuid()
        return None if found is None else hashlib.sha256(repr(found).encode()).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: the state and ``uuid``, for caches that look at nothing else."""
        key = self.uuid()
        state = {"options": self.options, "fingerprint": self.fingerprint, "policy": self.policy}
        return {**state, "key": key if key is not None else lambda: None}

    def __call__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int = 0,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split a joint graph into its forward and its backward under the budget.

        Raises:
            InvalidOptionError: Inductor asks, and the options are for graphs that run as they are.
        """
        if kwargs.get("compiler") == "inductor" and self.options.compiler != "inductor":
            problem = (
                "Inductor would compile graphs that write in place. Use partitioner(compiler='inductor')."
            )
            raise InvalidOptionError("compiler", problem)
        if not has_backward(gm, num_fwd_outputs):
            return partitioners.default_partition(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
        static_inputs = static_lifetime_input_indices or ()
        if self.compilation is not None:
            return self.compilation.split(gm, joint_inputs, num_fwd_outputs, static_inputs)
        compilation = Compilation(self.options, self.fingerprint, journal.graph_name())
        halves = compilation.split(gm, joint_inputs, num_fwd_outputs, static_inputs)
        journal.add(compilation)
        journal.log(compilation)
        return halves

    def uuid(self) -> object:
        """What caches of compiled graphs depend on besides the graph: source, torch, options, calibration."""
        if callable(self.options.planner) or self.policy == repr(Asking()):
            return None  # a function has no text that names it in another process: nothing is cached
        source = compilers.source_hash(pathlib.Path(__file__).parents[1])
        try:
            calibration = calibrate.fingerprint(self.options.cost)
        except FxrematError as error:  # planning raises it as well, and a fallback depends on nothing else
            calibration = str(error)
        return source, repr(self.options), calibration, self.fingerprint, self.policy


def has_backward(module: fx.GraphModule, num_fwd_outputs: int) -> bool:
    """Whether the joint graph computes any gradient."""
    (outputs,) = next(iter(module.graph.find_nodes(op="output"))).args
    return any(isinstance(leaf, fx.Node) for leaf in outputs[num_fwd_outputs:])


def partitioner(**options: Any) -> Partitioner:
    """A partitioner for AOTAutograd's ``partition_fn`` or Inductor's ``custom_partitioner_fn``.

    Args:
        **options: As for the backend, but for ``detect_writes``, ``verify`` and Inductor's own, which it must
            be given.

    Raises:
        InvalidOptionError: An option or its value is unknown, or is none of a partitioner's.

    Example:
        >>> import torch; from functorch.compile import aot_function
        >>> partition = partitioner(budget="min", compiler="eager")
        >>> square = aot_function(torch.square, lambda graph, inputs: graph, partition_fn=partition)
        >>> x = torch.ones(2, requires_grad=True)
        >>> square(x).sum().backward()
        >>> x.grad
        tensor([2., 2.])
    """
    parsed = Options.parse(options)
    for name in parsed.inductor:
        raise InvalidOptionError(name, "is Inductor's own. Give it to torch.compile, beside the partitioner.")
    for name in ("detect_writes", "verify"):
        if getattr(parsed, name):
            raise InvalidOptionError(name, "is for backend='fxremat'; a partitioner runs no graph.")
    if share_of_device(parsed.budget) is not None:
        problem = f"{parsed.budget!r} is for backend='fxremat', which asks the device. Give bytes."
        raise InvalidOptionError("budget", problem)
    return Partitioner(parsed)
