"""Verification: a compiled graph's results, held against those of the same graph without fxremat.

Option ``verify`` says for how many of its first training calls. Right before such a call, and with nothing
of it left behind, both are run apart on copies of the inputs, forward and backward: the compiled graph, and
the *reference*, which the same compiler makes of the same graph with a partitioner of PyTorch's. Both begin
with the same state of the random generators, and their backwards with the same random tangents. Compared are
the outputs, what was written to inputs, the gradients and the generators' states.

*Difference*: of two tensors, the largest of their elements' differences, relative to the largest element of
all outputs, or of all gradients: a gradient that is zero but for rounding has no size of its own.
*Tolerance*: none for graphs that run as they are. Inductor fuses what it recomputes with other operators,
which rounds otherwise: half of the digits of the coarsest type in the graph are to agree.

Left out: graphs that may not be run twice more, or whose inputs can't be copied; the reason is told. An
operator that changes what nobody hands it, and is registered as PyTorch's own, would do so twice more.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxremat._torch import autograd, compilers, graphs
from fxremat.graph import ops
from fxremat.measure import can_measure, measure_peak
from fxremat.report.verification import Verification


@dataclass(frozen=True, slots=True)
class Subject:
    """What is verified.

    Attributes:
        compiled: Runs the graph: called with its inputs, returns its outputs.
        reference: Makes what runs it without fxremat, when it is first needed.
        names: What the user calls the inputs.
        tolerance: The largest difference that is taken for rounding.
        obstacle: Why the graph can't be verified; empty where it can.
    """

    compiled: Callable[..., Any]
    reference: Callable[[], Callable[..., Any]]
    names: Sequence[str]
    tolerance: float
    obstacle: str


class Verified:
    """A compiled graph that is verified when it is called for the first few times in training."""

    def __init__(
        self,
        subject: Subject,
        calls: int,
        tell: Callable[[Verification], bool],
        apart: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        """
        Args:
            subject: The graph.
            calls: How many calls are verified.
            tell: Called with what each has shown; says whether the compiled graph may go on.
            apart: What is run inside is no part of the user's step.
        """
        self._subject = subject
        self._left = calls
        self._tell = tell
        self._apart = apart
        self._run = subject.compiled
        self._reference: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph."""
        if self._left and _is_training(inputs):
            self._verify(inputs)
        return self._run(*inputs)

    def _verify(self, inputs: Sequence[Any]) -> None:
        reason = self._subject.obstacle or _obstacle(inputs)
        if reason:
            self._tell(Verification(reason=reason))
            self._left = 0 if self._subject.obstacle else self._left
            return
        self._left -= 1
        with self._apart():
            if self._reference is None:
                self._reference = self._subject.reference()
            found = _compared(self._subject, self._reference, inputs)
        if not self._tell(found):
            self._run, self._left = self._reference, 0
        if not self._left:
            self._reference = None


def _is_training(inputs: Sequence[Any]) -> bool:
    """Whether a call is one of a training step, and not of a compiler that traces."""
    if compilers.is_tracing() or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return any(isinstance(each, Tensor) and each.requires_grad for each in inputs)


# --- What can't be verified ---------------------------------------------------------------------------


def obstacle(module: fx.GraphModule) -> str:
    """Why a graph of Dynamo's may not be run twice more; empty if it may."""
    if [*module.parameters(), *module.buffers()]:
        return "the graph has tensors of its own, of which no copies can be given to it"
    nested = [each for each in module.modules() if isinstance(each, fx.GraphModule)]
    nodes = (node for each in nested for node in each.graph.nodes if node.op == "call_function")
    for node in nodes:
        namespace = graphs.namespace(node.target)
        if graphs.has_registered_effect(node.target) or ops.is_collective(node):
            return f"{node.target} has an effect"
        if namespace is not None and namespace not in ops.PURE_NAMESPACES:
            return f"{node.target} is a custom operator, which may have effects"
    return ""


def _obstacle(inputs: Sequence[Any]) -> str:
    """Why a call can't be verified; empty if it can."""
    if autograd.has_saved_tensor_hooks() or autograd.is_in_pass():
        return "the call is inside of a checkpoint, or of hooks for saved tensors"
    tensors = [each for each in inputs if isinstance(each, Tensor)]
    if any(not _is_plain(each) for each in tensors):
        return "an input is no plain tensor"
    if any(not isinstance(each, (Tensor, int, float, type(None))) for each in inputs):
        return "an input is neither a tensor nor a number"
    storages = [each.untyped_storage()._cdata for each in tensors if each.numel()]
    if len(set(storages)) < len(storages):
        return "two of the inputs share memory"
    return ""


def _is_plain(tensor: Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
    return type(tensor) in (Tensor, nn.Parameter) and is_dense and not tensor.is_inference()


# --- Running apart ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Ran:
    """What a run has left behind, by name.

    Attributes:
        outputs: Its outputs, the inputs that it wrote to, and the states of the random generators.
        gradients: Those of its inputs.
    """

    outputs: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Copies:
    """Copies of a call's inputs, each with memory of its own.

    Attributes:
        leaves: The leaves of autograd that gradients go to, by what the user calls them.
        given: What the graph is called with.
    """

    leaves: dict[str, Tensor]
    given: list[Any]


def _compared(subject: Subject, reference: Callable[..., Any], inputs: Sequence[Any]) -> Verification:
    """What a call shows."""
    devices = list(dict.fromkeys(each.device for each in inputs if isinstance(each, Tensor)))
    tangents: list[Tensor] = []
    found, expected = _Ran(), _Ran()
    with _same_random_numbers(devices):
        _run(reference, _copied(inputs, subject.names), devices, tangents, expected)
    copies = _copied(inputs, subject.names)
    with _same_random_numbers(devices):
        peak_bytes = _measured(lambda: _run(subject.compiled, copies, devices, tangents, found), devices[0])
    difference, place = _largest_difference(found, expected)
    norms = _norm(found.gradients), _norm(expected.gradients)
    return Verification(1, difference, place, subject.tolerance, *norms, peak_bytes)


def _copied(inputs: Sequence[Any], names: Sequence[str]) -> _Copies:
    leaves: dict[str, Tensor] = {}
    given: list[Any] = []
    for place, each in enumerate(inputs):
        copy = _copy(each) if isinstance(each, Tensor) else each
        if isinstance(each, Tensor) and each.requires_grad:
            leaves[names[place] if place < len(names) else f"input {place}"] = copy.requires_grad_()
            copy = copy if each.is_leaf else _Result.apply(copy)  # type: ignore[no-untyped-call]
        given.append(copy)
    return _Copies(leaves, given)


def _copy(tensor: Tensor) -> Tensor:
    """A tensor that lies in memory of its own as the other lies in its."""
    return _shown(tensor, tensor.untyped_storage().clone())


def _shown(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


class _Result(torch.autograd.Function):
    """A result of autograd's that is what a leaf is, in its memory: a graph may write to it."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return _shown(leaf, leaf.untyped_storage())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@contextlib.contextmanager
def _same_random_numbers(devices: Sequence[torch.device]) -> Iterator[None]:
    """Draw the random numbers that are drawn next behind it, too."""
    indices = [each.index for each in devices if each.type == "cuda"]
    with torch.random.fork_rng(devices=indices):
        yield


def _run(
    function: Callable[..., Any],
    copies: _Copies,
    devices: Sequence[torch.device],
    tangents: list[Tensor],
    ran: _Ran,
) -> None:
    """Run forward and backward; draw the tangents, if there are none yet."""
    writes = [_writes(each) for each in copies.given]
    outputs = function(*copies.given)
    flat = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    ran.outputs = {f"output {place}": each for place, each in enumerate(flat)}
    for place, each in enumerate(copies.given):
        if _writes(each) != writes[place]:
            ran.outputs[f"input {place}"] = each
    roots = [each for each in ran.outputs.values() if isinstance(each, Tensor) and each.grad_fn is not None]
    if not tangents:
        tangents += map(_drawn, roots)
    if len(roots) == len(tangents) and roots:
        found = torch.autograd.grad(roots, [*copies.leaves.values()], tangents, allow_unused=True)
        ran.gradients = {f"gradient of {name}": each for name, each in zip(copies.leaves, found, strict=True)}
    for device in devices:
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        ran.outputs[f"random numbers of {device}"] = state


def _writes(value: object) -> int:
    return autograd.count_of_writes(value) if isinstance(value, Tensor) else 0


def _drawn(root: Tensor) -> Tensor:
    """A tangent: normal numbers, the same each time."""
    generator = torch.Generator(root.device).manual_seed(0)
    return torch.randn(root.shape, generator=generator, dtype=root.dtype, device=root.device)


def _measured(step: Callable[[], None], device: torch.device) -> int | None:
    """The peak of a step; None where it can't be measured, which runs it all the same."""
    if not can_measure(device):
        step()
        return None
    return measure_peak(step, device=device).peak_bytes


# --- Comparing ----------------------------------------------------------------------------------------


def _largest_difference(found: _Ran, expected: _Ran) -> tuple[float, str]:
    """The largest difference, and where it is; infinite where there is a tensor in one of them alone."""
    worst, place = 0.0, ""
    for ours, theirs in ((found.outputs, expected.outputs), (found.gradients, expected.gradients)):
        scale = max((_largest(each) for each in theirs.values() if isinstance(each, Tensor)), default=0.0)
        for name in dict.fromkeys((*theirs, *ours)):
            each = _difference(ours.get(name), theirs.get(name), scale)
            if each > worst:
                worst, place = each, name
    return worst, place


def _difference(found: Any, expected: Any, scale: float) -> float:
    """The largest difference of two tensors, relative to the scale; what is no tensor is equal or not."""
    if not (isinstance(found, Tensor) and isinstance(expected, Tensor)):
        return 0.0 if type(found) is type(expected) and found == expected else math.inf
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf
    ours, theirs = _numbers(found), _numbers(expected)
    is_equal = (ours == theirs) | (ours.isnan() & theirs.isnan())
    if bool(is_equal.all()):
        return 0.0
    if not _is_inexact(found):
        return math.inf
    largest = float((ours - theirs).abs()[~is_equal].max())
    return largest / scale if math.isfinite(largest) and scale else math.inf


def _largest(tensor: Tensor) -> float:
    """The size of a tensor's largest finite element; 0.0 for whole numbers."""
    if not _is_inexact(tensor) or not tensor.numel():
        return 0.0
    return float(_numbers(tensor).abs().nan_to_num(0.0, 0.0, 0.0).max())


def _norm(gradients: Mapping[str, Any]) -> float:
    """The Euclidean norm of all of them together."""
    return math.hypot(*(float(_numbers(each).norm()) for each in gradients.values() if each is not None))


def _numbers(tensor: Tensor) -> Tensor:
    """The real numbers in a tensor, in double precision where they are inexact."""
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    return plain.double() if plain.is_floating_point() else plain


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def rounding(values: Iterable[object]) -> float:
    """Half of the digits of the coarsest type among tensors: the square root of its epsilon.

    >>> round(rounding([torch.ones(1), torch.ones(1, dtype=torch.bfloat16)]), 3)
    0.088
    """
    types = {each.dtype for each in values if isinstance(each, Tensor) and _is_inexact(each)}
    return math.sqrt(max((torch.finfo(each).eps for each in types), default=0.0))
