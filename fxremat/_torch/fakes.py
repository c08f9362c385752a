"""The door to private torch names of fake tensors: programs that run without memory and without kernels.

Under a ``Rehearsal`` every operator's results are fake: they have sizes and a device, and take no memory.
Tensors that were there before stand for fake ones of their own, and are not written to. What would be live
is counted: a storage from the operator that makes it to the death of the last tensor that shows it.

See ``graphs.py`` for the other doors.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.pgo import get_code_state
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from fxremat._torch import partitioners

__all__ = [
    "Rehearsal",
    "copied",
    "is_fake",
    "like",
    "outside_of_modes",
    "propagate_layouts",
    "rehearsable",
    "replaced",
    "tensors",
    "undisturbed",
]


_aten = torch.ops.aten
_SEQUENCES = frozenset(
    (
        _aten.arange.default,
        _aten.arange.start,
        _aten.arange.start_step,
        _aten.linspace.default,
        _aten.logspace.default,
    )
)
_MAX_NUMBERS = 4096  # of a sequence that has numbers where models are made


class Rehearsal(FakeTensorMode):
    """A mode in which all new tensors are fake, and their bytes are counted.

    Attributes:
        live_bytes: What is live of the memory that was allocated inside.
        peak_bytes: The most that was live since this was set last.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.live_bytes = self.peak_bytes = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._is_counting = True
        self._is_making = False

    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operator on fake tensors, and count the storages of its results.

        What it is made of, where torch has no more than that for fake tensors, is not what runs.
        """
        args, kwargs = pytree.tree_map_only(Tensor, self._stand_in, (args, dict(kwargs or {})))
        with self.uncounted():
            results = super().dispatch(func, types, args, kwargs)
        if self._is_making and func in _SEQUENCES:
            results = self._with_numbers(results, func, args, kwargs)
        if self._is_counting:
            self.count(results)
        return results

    def _with_numbers(self, fake: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """A short sequence that may be read: rates of layers, say, which models make by ``linspace``."""
        if fake.numel() > _MAX_NUMBERS or fake.device.type != "cpu":
            return fake
        return self.fake_tensor_converter.from_real_tensor(self, func(*args, **kwargs), make_constant=True)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """The fake tensor that stands for one which was there before, or its own if it is fake."""
        if isinstance(tensor, FakeTensor):
            return tensor
        fake: Tensor = self.fake_tensor_converter.from_real_tensor(self, tensor)
        self._known.add(fake.untyped_storage())
        return fake

    def count(self, values: object) -> None:
        """Count the storages of tensors from now on, each once."""
        for each in pytree.tree_leaves(values):
            if isinstance(each, FakeTensor) and each.untyped_storage() not in self._known:
                storage = each.untyped_storage()
                size = storage.nbytes()
                self._known.add(storage)
                self.live_bytes += size
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                weakref.finalize(storage, self._freed, size).atexit = False

    def _freed(self, size: int) -> None:
        self.live_bytes -= size

    def ignore(self, values: Sequence[object]) -> None:
        """Never count the storages of tensors."""
        self._known.update(each.untyped_storage() for each in values if isinstance(each, FakeTensor))

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Make fake tensors inside, and count none of them: a model, a batch.

        A module's ``to`` swaps its fake parameters for others, which torch refuses while anything refers to
        them weakly; so the mode forgets by which it would know them again. Weights have no numbers: of those
        that ``trunc_normal_`` draws, it would look for some that are to be drawn again. Short sequences have.
        """
        swap = torch.utils.swap_tensors

        def swap_forgotten(first: Tensor, second: Tensor) -> None:
            memo = self.fake_tensor_converter.meta_converter.tensor_memo
            for key in [key for key, tensor in memo.items() if tensor is first or tensor is second]:
                del memo[key]
            swap(first, second)  # type: ignore[no-untyped-call]

        def as_it_is(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
            return tensor

        self._is_making = True
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self, "_is_making", False)
            stack.enter_context(replaced(torch.utils, "swap_tensors", swap_forgotten))
            stack.enter_context(replaced(nn.init, "_no_grad_trunc_normal_", as_it_is))
            stack.enter_context(replaced(fake_tensor, "CONSTANT_NUMEL_LIMIT", _MAX_NUMBERS))
            stack.enter_context(self)
            stack.enter_context(self.uncounted())
            yield

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count nothing that is made inside."""
        was_counting, self._is_counting = self._is_counting, False
        try:
            yield
        finally:
            self._is_counting = was_counting


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Have another value in the place of an attribute, which need not be there."""
    there = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if there else delattr(owner, name)


def like(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """A tensor of the same sizes, for the mode that is in force; on the device of the other, or on one."""
    found = torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device or tensor.device
    )
    needs = tensor.requires_grad
    return nn.Parameter(found, needs) if isinstance(tensor, nn.Parameter) else found.requires_grad_(needs)


def copied(values: Any, device: torch.device) -> Any:
    """Values like others, modules among them, with fake tensors on a device in the place of all tensors.

    To be called under ``Rehearsal.making``.
    """
    modules = [each for each in pytree.tree_leaves(values) if isinstance(each, nn.Module)]
    held = (tensor for each in modules for tensor in (*each.parameters(), *each.buffers()))
    return copy.deepcopy(values, {id(each): like(each, device) for each in (*held, *tensors(values))})


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has sizes, but no numbers."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def tensors(values: Any) -> list[Tensor]:
    """The tensors that stand in containers, however deep."""
    return [each for each in pytree.tree_leaves(values) if isinstance(each, Tensor)]


def rehearsable(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A graph of Dynamo's for a rehearsal: of what it does, its results are counted, and its gradients.

    It holds nothing between its forward and its backward.

    Args:
        module: The graph; it may be changed.
        inputs: Example inputs.
    """
    returned: list[int] = []

    def partition(joint: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        returned.append(kwargs["num_fwd_outputs"])
        return partitioners.default_partition(joint, joint_inputs, **kwargs)

    def forward(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(values: list[Any]) -> Any:
            with _going_on().uncounted():
                results = _run(graph, values)
                kept = returned[-1] if returned else len(results)
                saved = [_apart(each) for each in results[kept:]]
            _going_on().ignore(saved)
            return (*results[:kept], *saved)

        return _boxed(run)

    def backward(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(values: list[Any]) -> Any:
            with _going_on().uncounted():
                results = _run(graph, values)
            _going_on().count(results)
            return results

        return _boxed(run)

    with outside_of_modes():
        compiler = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=partition)
        compiled = compiler(module, inputs)

    def call(*values: Any) -> Any:
        results = compiled(*values)
        _going_on().count(results)
        return results

    return call


def _going_on() -> Rehearsal:
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    assert isinstance(mode, Rehearsal)
    return mode


def _run(graph: fx.GraphModule, values: list[Any]) -> Any:
    given = list(values)
    values.clear()  # the caller's only references
    return graph(*given)


def _boxed(run: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _apart(value: Any) -> Any:
    """A tensor like another, with memory of its own."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


def outside_of_modes() -> contextlib.AbstractContextManager[Any]:
    """Run as if no mode was in force."""
    return _disable_current_modes()


@contextlib.contextmanager
def undisturbed(refuse_optimizers: Callable[..., None]) -> Iterator[None]:
    """Leave nothing of what runs inside: no gradients, no random numbers drawn, no traces of Dynamo's.

    Args:
        refuse_optimizers: Called when an optimizer is about to step, whose state would be fake from then on.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_same_gradients())
        stack.enter_context(_same_random_numbers())
        stack.enter_context(_same_traces())
        stack.callback(torch.clear_autocast_cache)
        stack.callback(register_optimizer_step_pre_hook(refuse_optimizers).remove)
        yield


@contextlib.contextmanager
def _same_gradients() -> Iterator[None]:
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    gradients = [(each, each.grad) for each in tensors if each.is_leaf and each.requires_grad]
    try:
        yield
    finally:
        for leaf, gradient in gradients:
            leaf.grad = gradient


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    python, numpy = random.getstate(), sys.modules.get("numpy")
    numbers = None if numpy is None else numpy.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numbers)


@contextlib.contextmanager
def _same_traces() -> Iterator[None]:
    """Have Dynamo forget what it traces inside, and the sizes that it met."""
    traced: dict[CodeType, list[CodeType]] = {}

    def note(code: CodeType, new_code: CodeType) -> None:
        traced.setdefault(code, []).append(new_code)

    sizes = get_code_state()
    sizes_before = copy.deepcopy(sizes)
    hook = register_bytecode_hook(note)
    try:
        yield
    finally:
        hook.remove()
        sizes.clear()
        sizes.update(sizes_before)
        for code, compiled in traced.items():
            _forget(code, compiled)


def _forget(code: CodeType, compiled: Sequence[CodeType]) -> None:
    """Have Dynamo forget traces of a function; where it has others, these still count against its limit."""
    entries = _debug_get_cache_entry_list(code)
    ours = [entry for entry in entries if any(entry.code is each for each in compiled)]
    if len(ours) == len(entries):
        reset_code(code)
        return
    for entry in ours:
        state = entry.guard_manager.extra_state
        assert state is not None
        state.invalidate(entry, DeletedGuardManagerWrapper("it was traced on fake tensors"))


def propagate_layouts(module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Give each node the value that it has for these inputs, as Inductor does before it lowers a graph.

    Views count as reshapes, as there: the forward may hand over values that lie otherwise than was traced.
    What waits (``compilers.order_after``) has a graph of its own, by whose values Inductor lays out what it
    makes.

    Args:
        module: A forward or a backward.
        inputs: Fake tensors for its placeholders.
    """
    from torch._inductor.fx_passes.control_dependencies import control_deps
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    class Propagation(FakeTensorProp):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            is_view = target is torch.ops.aten.view.default
            return super().call_function(torch.ops.aten.reshape.default if is_view else target, args, kwargs)

    mode = torch._guards.detect_fake_mode(inputs)
    Propagation(module, mode=mode).propagate_dont_convert_inputs(*inputs)
    for gate in module.graph.find_nodes(op="call_function", target=control_deps):
        value = gate.meta["val"]
        if isinstance(value, torch.Tensor) and not value.is_contiguous():
            _, graph, *read = gate.args
            given = (each.meta["val"] if isinstance(each, fx.Node) else each for each in read)
            Propagation(getattr(module, graph.target), mode=mode).propagate_dont_convert_inputs(*given)
