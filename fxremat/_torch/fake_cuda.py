"""The door to private torch names of CUDA without a GPU: Inductor's code for a card, run on fake tensors.

Inside of ``card`` a machine without a GPU seems to have one of given properties. Tensors of device "cuda" are
fake (``fakes.py``); ``torch.compile`` traces, lowers, schedules and generates code for them as on a machine
with that card, and the generated wrapper runs: what it allocates are fake tensors, operators of libraries run
on fake tensors, and Triton's kernels do nothing. None of them is compiled.

Stood in for are

- torch's own C++: a device guard, the answers of a build with CUDA and cuDNN, the choice of an attention
  kernel (``fake_cuda.cpp``, compiled by Inductor's compiler of CPU code into its cache);
- what Inductor asks of a device, through an interface that it lets others register;
- single functions of ``torch.cuda`` and of Inductor, by ``_STANDS_IN``, while ``card`` is in force.

Left out: products are not padded, which Inductor decides by timing, as it does for ``max_autotune``; and the
workspaces of libraries are not allocated. Patterns that Inductor registers once for a process are those of
the device that was first compiled for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import device_interface
from torch._subclasses import fake_tensor
from torch.utils import _pytree as pytree
from torch.utils import _triton as triton_facts
from torch.utils._python_dispatch import TorchDispatchMode

from fxremat._torch import compilers
from fxremat._torch.fakes import replaced

__all__ = ["Properties", "card", "missing", "moved"]

_DEVICE = torch.device("cuda", 0)
_FLASH_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class Properties:
    """What Inductor asks of a card; named as torch names it.

    Attributes:
        name: What the card calls itself.
        major: Of the compute capability.
        minor: Of the compute capability.
        multi_processor_count: Streaming multiprocessors.
        total_memory: Bytes.
        max_threads_per_multi_processor: Resident at once.
        warp_size: Threads; this and the next are the same for all cards.
        regs_per_multiprocessor: Registers of 32 bits.
        max_threads_per_block: In a block of a kernel.
    """

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    max_threads_per_multi_processor: int
    warp_size: int = 32
    regs_per_multiprocessor: int = 1 << 16
    max_threads_per_block: int = 1024


def missing() -> str | None:
    """What the machine lacks for ``card``, or None if it lacks nothing."""
    if torch.cuda.is_available():
        return "this machine has a GPU of its own: use it in place of one that is not there"
    if find_spec("triton") is None:
        return "Inductor writes CUDA code with Triton, which is not installed: pip install triton"
    problem = compilers.missing_compiler("cpu")
    return None if problem is None else f"{problem}; it makes what stands in for CUDA"


@contextlib.contextmanager
def card(properties: Properties) -> Iterator[None]:
    """Have this thread compile for a card that is not there, and run its code on fake tensors.

    One at a time, and only where ``missing`` finds nothing. Compiled code is of no use outside, and Dynamo
    forgets it. Under ``fakes.Rehearsal`` the storages that it allocates are counted.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(_forget)
        stack.enter_context(_built_with_cuda((properties.major, properties.minor) >= _FLASH_CAPABILITY))
        stack.enter_context(_interface(properties))
        for owner, name, value in _stands_in(properties):
            stack.enter_context(replaced(owner, name, value))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
        stack.enter_context(torch.compiler.config.patch(force_disable_caches=True))
        stack.enter_context(torch._inductor.config.patch(compile_threads=1))  # nothing is left to others
        _forget()
        yield


def moved(module: nn.Module, values: Any) -> Any:
    """The values with tensors on the card in place of theirs, of the same sizes and strides.

    So it is done to the module's parameters and buffers, in place. To be called under a mode of fake tensors.
    """
    memo: dict[Tensor, Tensor] = {}

    def on_card(tensor: Tensor) -> Tensor:
        if tensor not in memo:
            found = _empty_strided(tensor.size(), tensor.stride(), tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            needs = tensor.requires_grad
            memo[tensor] = nn.Parameter(found, needs) if is_parameter else found.requires_grad_(needs)
        return memo[tensor]

    for each in module.modules():
        tables: tuple[dict[str, Any], ...] = (each._parameters, each._buffers)
        for held in tables:
            held.update({name: on_card(tensor) for name, tensor in held.items() if tensor is not None})
    return pytree.tree_map_only(Tensor, on_card, values)


@functools.cache
def _library() -> Any:
    from torch._inductor.codecache import CppCodeCache

    return CppCodeCache.load(Path(__file__).with_suffix(".cpp").read_text(encoding="utf-8"))


@contextlib.contextmanager
def _built_with_cuda(has_flash: bool) -> Iterator[None]:
    """Have torch's C++ answer as a build with CUDA."""
    library = _library()
    library.enter(has_flash)
    try:
        yield
    finally:
        library.leave()


@contextlib.contextmanager
def _interface(properties: Properties) -> Iterator[None]:
    """Have Dynamo and Inductor ask the card."""
    answers: dict[str, Any] = {
        "current_device": lambda: 0,
        "exchange_device": lambda index: 0,
        "maybe_exchange_device": lambda index: 0,
        "get_device_properties": lambda device=None: properties,
        "set_device": _nothing,
    }
    worker = type("Worker", (), {name: staticmethod(answer) for name, answer in answers.items()})
    answers |= {
        "device_count": lambda: 1,
        "get_compute_capability": lambda device=None: 10 * properties.major + properties.minor,
        "get_raw_stream": lambda index: 0,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or properties.major >= 8,
        "is_triton_capable": lambda device=None: True,
        "raise_if_triton_unavailable": _nothing,
        "synchronize": _nothing,
    }
    members = {name: staticmethod(answer) for name, answer in answers.items()}
    asked: Any = type("AbsentCard", (device_interface.CudaInterface,), {**members, "Worker": worker})
    interfaces = device_interface.device_interfaces
    device_interface.get_interface_for_device("cpu")  # registers all that torch has
    before = dict(interfaces)
    for name in ("cuda", "cuda:0"):
        device_interface.register_interface_for_device(name, asked)
    try:
        yield
    finally:
        interfaces.clear()
        interfaces.update(before)


# --- Single functions -----------------------------------------------------------------------------------


def _stands_in(properties: Properties) -> Iterator[tuple[object, str, object]]:
    """Owner, name and value of what is replaced."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.constant_folding import ConstantFolder
    from torch._inductor.fx_passes import pad_mm

    cuda, guards = torch.cuda, torch._C._dynamo.guards
    yield fake_tensor, "init_gpu_context", lambda device: None
    yield fake_tensor.FakeTensorMode, "avoid_device_init", property(lambda mode: True)
    yield torch.version, "cuda", "12.8"
    yield cuda, "is_available", lambda: True
    yield cuda, "_lazy_init", lambda: None
    yield cuda, "device_count", lambda: 1
    yield cuda, "current_device", lambda: 0
    yield cuda, "set_device", lambda device: None
    yield cuda, "_exchange_device", lambda device: 0
    yield cuda, "_maybe_exchange_device", lambda device: 0
    yield cuda, "get_device_properties", lambda device=None: properties
    yield cuda, "get_rng_state", lambda device="cuda": torch.zeros(16, dtype=torch.uint8, device="cpu")
    yield cuda, "set_rng_state", lambda state, device="cuda": None
    yield cuda, "synchronize", lambda device=None: None
    yield cuda, "is_current_stream_capturing", lambda: False
    yield cuda, "_DeviceGuard", _Guard
    yield torch._C, "_cuda_getCurrentRawStream", lambda index: 0
    yield triton_facts, "triton_hash_with_backend", lambda: ""  # of kernels that are compiled
    yield guards, "_empty_strided_cuda", _empty_strided
    yield guards, "_reinterpret_tensor", _reinterpret
    yield guards, "assert_size_stride", _nothing
    yield guards, "assert_alignment", _nothing
    yield AsyncCompile, "triton", lambda self, name, source, *args, **kwargs: _Kernel()
    yield ConstantFolder, "run", _folding_on_cpu(ConstantFolder.run)
    yield pad_mm, "get_cached_should_pad", lambda key: False  # or kernels would be timed


def _nothing(*args: object, **kwargs: object) -> None:
    pass


class _OnCpu(TorchDispatchMode):
    """What is computed for the card is computed by the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def _folding_on_cpu(fold: Any) -> Any:
    """What computes the constants of a graph, which have numbers."""

    mode: Any = _OnCpu  # torch has no types for it

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with mode():
            return fold(self, *args, **kwargs)

    return run


class _Guard:
    """The current device, which is the only one."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None: ...


class _Kernel:
    """A kernel of Triton's that is not compiled."""

    run = staticmethod(_nothing)


def _empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=_DEVICE)


def _reinterpret(tensor: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _forget() -> None:
    """Drop what torch remembers of the machine's devices, and what it has compiled."""
    from torch._inductor.runtime.hints import DeviceProperties

    torch._dynamo.reset()
    triton_facts.has_triton.cache_clear()
    DeviceProperties.create.__func__.cache_clear()
