"""Operators as steps that train: torch's own database of them is an oracle for peaks that is not ours.

Terms. An *OpInfo* is an entry of the database. It names an operator and makes *samples*, ways to call it. A
*case* is a way to call an operator, such as a sample, mostly enlarged: its operands are repeated until they
and the results hold ``LARGE_BYTES``, so that what an operator allocates beside its result shows. A case
becomes a step in two ways:

- *trained*: each operand that may need a gradient is a parameter times one, the operator reads the products,
  and the loss is the sum of its results' squares. So there is a backward, and the products and the results
  may be computed again for it.
- *constant*: no operand needs a gradient, the loss reads one number of each result, and the results are
  returned. The step's peak is then that of the operator itself, which no backward hides, and operators
  without a derivative have one.

``outcomes`` trains a step by several plans and tells predicted and measured peaks; ``uncompiled`` and
``without_fxremat`` are what it is held against. Where the peaks differ, ``surprises``
runs the joint graph node by node and names those that allocate more than was predicted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import fxremat
from fxremat._torch import graphs
from fxremat._torch.compilers import Origin
from fxremat.device.results import as_run
from fxremat.graph import ops
from fxremat.measure import held_bytes, measure_peak

LARGE_BYTES, MOST_BYTES = 1 << 17, 1 << 24
NUMBER_BYTES = 16  # the largest Python number, which ATen makes a tensor of while an operator runs

# Operators whose samples stay as small as they are, and why.
SMALL = {
    "nn_functional_embedding_bag": "its bags are not in order when they are repeated, and it does not look",
    "pca_lowrank": "the gradient of its decomposition takes the square of its rows",
    "svd_lowrank": "the gradient of its decomposition takes the square of its rows",
    "tensor_split": "each index is one more result, and many results are a large graph",
    "unbind": "each row is one more result",
    "unbind_copy": "each row is one more result",
    "unsafe_split": "each part is one more result",
}

# What an operator raises that is not made for operands of other sizes.
REFUSALS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)


# --- Cases ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Case:
    """A way to call an operator.

    Attributes:
        name: The OpInfo's name, the dtype and the number of the sample.
        call: The operator.
        leaves: Its operands and other arguments.
        spec: How they are nested.
    """

    name: str
    call: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: Any

    def run(self, leaves: Sequence[Any]) -> list[Tensor]:
        """The tensors that the operator makes of other leaves."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.spec)
        made = pytree.tree_leaves(self.call(*args, **kwargs))
        return [each for each in made if isinstance(each, Tensor)]

    @property
    def operator(self) -> str:
        """The OpInfo's name."""
        return self.name.partition(" ")[0]

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The operands that may need a gradient."""
        return tuple(filter(needs_gradient, self.leaves))


def needs_gradient(leaf: object) -> bool:
    """Whether an argument is an operand that a sample wants a gradient of."""
    return isinstance(leaf, Tensor) and leaf.requires_grad


def made(name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Case:
    """The case of a call as it is written."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return Case(name, call, tuple(leaves), spec)


def database() -> list[Any]:
    """All OpInfos. Some set a seed inside of their call, which Dynamo doesn't trace: steps set it instead."""
    from torch.testing._internal import common_methods_invocations

    common_methods_invocations.wrapper_set_seed = lambda call, *args, **kwargs: call(*args, **kwargs)
    return list(common_methods_invocations.op_db)


def cases(op: Any, dtype: torch.dtype, at_most: int) -> list[Case]:
    """So many samples of an OpInfo that have a result, as different as there are, and enlarged."""
    torch.manual_seed(0)
    found: dict[str, Case] = {}
    samples = op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd)
    for number, sample in enumerate(itertools.islice(samples, 64)):
        name = f"{op.formatted_name} {str(dtype).removeprefix('torch.')} {number}"
        case = made(name, op.op, sample.input, *sample.args, **sample.kwargs)
        if any(each.numel() for each in case.run(_copies(case.leaves))):
            found.setdefault(_likeness(case), case)
    step = max(1, len(found) // at_most)
    chosen = list(found.values())[::step][:at_most]
    return chosen if op.formatted_name in SMALL else [enlarged(case) for case in chosen]


def _likeness(case: Case) -> str:
    """Equal for samples that differ in sizes and numbers alone."""
    kinds = [leaf.dim() if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in case.leaves]
    return f"{case.spec}{kinds}"


# --- Larger cases ---------------------------------------------------------------------------------------


def longer(tensor: Tensor) -> Tensor:
    """Four times as long in the first dimension."""
    return tensor if tensor.dim() == 0 else torch.cat([tensor.detach()] * 4)


def batched(tensor: Tensor) -> Tensor:
    """Four times the same in a new first dimension."""
    return torch.stack([tensor.detach()] * 4)


def enlarged(case: Case) -> Case:
    """The case with operands repeated in the first way that the operator takes, else as it is."""
    for grow, chosen in itertools.product((longer, batched), (_all, _as_long_as_first, _first)):
        larger = _grown(case, grow, chosen)
        if larger is not None:
            return larger
    return case


def _all(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors


def _as_long_as_first(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [each for each in tensors if each.shape[:1] == tensors[0].shape[:1]]


def _first(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors[:1]


def _grown(
    case: Case, grow: Callable[[Tensor], Tensor], chosen: Callable[[Sequence[Tensor]], Sequence[Tensor]]
) -> Case | None:
    """The case grown until it is large; None if it is refused, stays small or grows huge."""
    for _ in range(8):
        held_bytes = _held_bytes(case)
        if held_bytes is None or held_bytes > MOST_BYTES:
            return None
        if held_bytes >= LARGE_BYTES:
            return case
        ids = set(map(id, chosen(list(ops.tensors(case.leaves)))))
        leaves = [
            grow(leaf).requires_grad_(leaf.requires_grad) if id(leaf) in ids else leaf for leaf in case.leaves
        ]
        case = replace(case, leaves=tuple(leaves))
    return None


def _held_bytes(case: Case) -> int | None:
    """Bytes of operands and results; None if the operator refuses the operands."""
    try:
        with torch.no_grad():
            operands = _copies(case.leaves)
            results = case.run(operands)
    except REFUSALS:
        return None
    return sum(each.nbytes for each in (*ops.tensors(operands), *results))


# --- Steps ----------------------------------------------------------------------------------------------


class Step(nn.Module):
    """What both kinds of step share: the tensors of a case, parameters where they need a gradient."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        for i, leaf in enumerate(case.leaves):
            if isinstance(leaf, Tensor):
                self._hold(f"leaf_{i}", leaf.detach().clone(), leaf.requires_grad)

    def __repr__(self) -> str:
        return f"{self.case.name}, {type(self).__name__.lower()}"

    def fresh(self) -> Step:
        """The same step before it has run."""
        return type(self)(self.case)

    def _hold(self, name: str, tensor: Tensor, is_learned: bool) -> None:
        if is_learned:
            self.register_parameter(name, nn.Parameter(tensor))
        else:
            self.register_buffer(name, tensor)

    def results(self, one: Tensor) -> list[Tensor]:
        """The operator's results, of what the caller does not hold where it may need a gradient."""
        leaves = []
        for i, leaf in enumerate(self.case.leaves):
            held = getattr(self, f"leaf_{i}") if isinstance(leaf, Tensor) else leaf
            leaves.append(held * one if needs_gradient(leaf) else held)
        return self.case.run(leaves)


class Trained(Step):
    """The sum of the squares of what an operator makes of its parameters, each multiplied by one before."""

    def forward(self, one: Tensor) -> Tensor:
        return torch.stack([_squares(each) for each in self.results(one) if _is_inexact(each)]).sum()


class Constant(Step):
    """One number of each result times a parameter, which alone needs a gradient; and the results."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.learned = nn.Parameter(torch.ones(()))

    def _hold(self, name: str, tensor: Tensor, is_learned: bool) -> None:
        self.register_buffer(name, tensor)

    def forward(self, one: Tensor) -> Any:
        results = self.results(one)
        numbers = [_number(each[(0,) * each.dim()]) for each in results if each.numel()]
        return torch.stack(numbers).sum() * self.learned, results


def _number(tensor: Tensor) -> Tensor:
    return tensor.abs() if tensor.is_complex() else tensor.float()


def steps(case: Case) -> list[Step]:
    """The steps that can be made of a case: trained where results have a gradient, and constant."""
    learned = any(each.requires_grad and _is_inexact(each) for each in case.run(_copies(case.leaves)))
    return [Trained(case), Constant(case)] if learned else [Constant(case)]


def _copies(leaves: Sequence[Any]) -> list[Any]:
    """The same, of tensors that may be written to and are no leaves of autograd."""
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _squares(tensor: Tensor) -> Tensor:
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return parts.square().sum()


# --- Outcomes -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a step left behind, and what it took.

    Attributes:
        ran: The results and the parameters' gradients of the first step.
        left: The buffers behind both.
        predicted_bytes: The predicted peak.
        measured_bytes: The measured peak of a second step.
        num_nodes: Nodes of the joint graph.
    """

    ran: tuple[Tensor | None, ...]
    left: tuple[Tensor, ...]
    predicted_bytes: int = 0
    measured_bytes: int = 0
    num_nodes: int = 0

    @property
    def excess_bytes(self) -> int:
        """What was measured above the prediction, Python numbers apart."""
        return self.measured_bytes - self.predicted_bytes

    @property
    def is_kept(self) -> bool:
        """Whether the step takes no more than was predicted, Python numbers apart."""
        return self.excess_bytes <= NUMBER_BYTES * self.num_nodes

    @property
    def is_tight(self) -> bool:
        """Whether the prediction is at most 1 % above what was measured."""
        return self.predicted_bytes <= 1.01 * self.measured_bytes


def outcome(model: nn.Module, **options: Any) -> Outcome:
    """Two training steps by a plan.

    Gradients are asked for, not accumulated: autograd would copy one that is not laid out as its parameter.
    """
    torch._dynamo.reset()
    options = {"compiler": "eager", **options}
    step = _step_of(torch.compile(model, backend="fxremat", fullgraph=True, options=options), model)
    count = len(fxremat.reports())
    ran = step()
    measured_bytes = measure_peak(step, device="cpu").peak_bytes
    (report,) = fxremat.reports()[count:]
    return Outcome(ran, tuple(model.buffers()), report.peak_bytes, measured_bytes, report.num_nodes)


class Plans:
    """A backend that compiles a graph by several plans, so that Dynamo traces it once; one of them runs.

    Attributes:
        options: The options of each plan.
        runs: Which of them runs.
    """

    def __init__(self, options: Sequence[Mapping[str, Any]]) -> None:
        self.options = options
        self.runs = 0

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        origin = Origin(module, inputs)
        compiled = [_within_least(origin, each) for each in self.options]
        return lambda *given: compiled[self.runs](*given)


def _within_least(origin: Origin, options: Mapping[str, Any]) -> Callable[..., Any]:
    """A graph compiled with the options; within the least budget that is possible where theirs is less."""
    while True:
        try:
            with origin.resumed():
                return fxremat.fxremat_backend(origin.module(), origin.inputs, options=options)
        except fxremat.InfeasibleBudgetError as error:
            if error.lowest_peak_bytes <= (error.budget_bytes or 0):
                raise
            options = {**options, "budget": error.lowest_peak_bytes}


def outcomes(model: nn.Module, plans: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """Two training steps by each of the plans, each from the buffers that the model has now.

    Gradients are asked for, not accumulated: autograd would copy one that is not laid out as its parameter.
    """
    torch._dynamo.reset()
    before = [each.clone() for each in model.buffers()]
    backend = Plans([{"compiler": "eager", **each} for each in plans])
    step = _step_of(torch.compile(model, backend=backend, fullgraph=True), model)
    count = len(fxremat.reports())
    seen = []
    for backend.runs in range(len(plans)):
        for buffer, each in zip(model.buffers(), before, strict=True):
            buffer.copy_(each)
        ran = tuple(each if each is None else each.clone() for each in step())
        measured_bytes, _ = held_bytes(step, torch.device("cpu"))
        seen.append((ran, tuple(each.clone() for each in model.buffers()), measured_bytes))
    return [
        Outcome(ran, left, report.peak_bytes, measured_bytes, report.num_nodes)
        for (ran, left, measured_bytes), report in zip(seen, fxremat.reports()[count:], strict=True)
    ]


def uncompiled(model: nn.Module) -> Outcome:
    """Two training steps as they are written; nothing is predicted."""
    step = _step_of(model, model)
    ran = step()
    step()
    return Outcome(ran, tuple(model.buffers()))


def without_fxremat(model: nn.Module) -> Outcome:
    """Two training steps as PyTorch's own backend ``"aot_eager"`` compiles them; nothing is predicted.

    Raises:
        TorchDynamoException: It refuses the step.
    """
    torch._dynamo.reset()
    step = _step_of(torch.compile(model, backend="aot_eager", fullgraph=True), model)
    ran = step()
    step()
    return Outcome(ran, tuple(model.buffers()))


def _step_of(subject: Any, model: nn.Module) -> Callable[[], tuple[Tensor | None, ...]]:
    """A step that returns what the subject does, and the gradients of the model's parameters."""
    parameters, one = tuple(model.parameters()), torch.ones(())

    def step() -> tuple[Tensor | None, ...]:
        torch.manual_seed(0)
        loss, *others = pytree.tree_leaves(subject(one))
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        return loss.detach(), *others, *gradients

    return step


def have_same_bits(found: Outcome, expected: Outcome) -> bool:
    """Whether results, gradients and buffers of two outcomes agree in every bit, but for those of NaNs."""
    pairs = zip((*found.ran, *found.left), (*expected.ran, *expected.left), strict=True)
    return all(a is b or (a is not None and b is not None and is_same(a, b)) for a, b in pairs)


def is_same(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors agree in every bit, but for those of NaNs."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    ours, theirs = (_real(each).contiguous() for each in (found, expected))
    same = _bits(ours) == _bits(theirs)
    return bool((same.all(-1) | (ours.isnan() & theirs.isnan())).all())


def _real(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of each number, in a last dimension."""
    return tensor.unsqueeze(-1).view(torch.uint8)


# --- Surprises ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Surprise:
    """A node that allocates something else than was predicted.

    Attributes:
        node: The node as the graph prints it.
        result_bytes: The predicted bytes of its result.
        held_bytes: Bytes that it left allocated.
        scratch_bytes: The predicted bytes of its scratch memory.
        passing_bytes: The bytes that it allocated and freed again.
    """

    node: str
    result_bytes: int
    held_bytes: int
    scratch_bytes: int
    passing_bytes: int

    def __str__(self) -> str:
        held = f"holds {self.held_bytes} of {self.result_bytes}"
        return f"{held}, scratch {self.passing_bytes} of {self.scratch_bytes}: {self.node}"


def surprises(model: nn.Module) -> list[Surprise]:
    """The nodes of a model's joint graph that allocate more than was predicted, when run one by one."""
    graph = as_run(fxremat.capture(model, torch.ones(())))
    assert graph.module is not None
    watch = _Watch(graph.module)
    torch.manual_seed(0)
    watch.run(*_inputs(graph.module, model))
    return list(watch.surprises(graph))


def _inputs(module: fx.GraphModule, model: nn.Module) -> Iterator[Tensor]:
    """What each placeholder stands for: the module's tensor, or the one that is the input and the tangent."""
    held = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    for node in module.graph.find_nodes(op="placeholder"):
        name = getattr(node.meta.get("desc"), "target", None)
        yield held[name].detach().clone() if name in held else torch.ones((), dtype=node.meta["val"].dtype)


class _Watch(fx.Interpreter):
    """Runs a graph and keeps what each node allocates."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[str, tuple[int, int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        results: list[Any] = []

        def run() -> Any:
            results.append(super(_Watch, self).run_node(n))

        measured = measure_peak(run, device="cpu")
        self.found[n.name] = (measured.peak_bytes, measured.end_bytes)
        return results[0]

    def surprises(self, graph: fxremat.JointGraph) -> Iterator[Surprise]:
        """What the run has shown."""
        for node, fx_node, scratch in zip(graph.nodes, graph.fx_nodes, graph.scratch_bytes, strict=True):
            if node.name not in self.found or graphs.is_symbolic(fx_node):
                continue
            peak, held = self.found[node.name]
            result = sum(graph.storage_bytes[storage] for storage in node.creates)
            if peak > result + scratch + NUMBER_BYTES or held > result + NUMBER_BYTES:
                yield Surprise(fx_node.format_node() or "", result, held, scratch, peak - held)
