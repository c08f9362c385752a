"""Patches: all that fxremat changes of torch while a process runs.

1. ``GraphLowering.save_output_code`` (``reading_code``; all versions). Generated code is read before its
   kernels are compiled, and torch hands it to nobody else. In force while any thread is inside, and put back
   by the last one that leaves.
2. An implementation of the operator ``control_deps`` for autograd (``add_missing_implementation``; torch
   2.11, later versions have one). Without it the operator takes no parameters. It stays: the operator is
   called whenever a graph with it is traced, in whatever thread.
3. ``torch.autograd._engine_run_backward`` (``watching_passes``; all versions), which every backward pass of
   a Python program goes through. Torch tells the nodes of a pass when it is over, but in a thread or with
   thread-local state of its own. In force while somebody watches.
4. ``_prepare_profiler`` and ``_enable_profiler`` of ``torch.autograd.profiler`` (``making_way``; all
   versions). Torch has one profiler for a thread, and a recording of ours gives way to one of a user.
   In force while anything is recorded.
5. ``torch._TorchCompileInductorWrapper.__call__`` (``taking_inductor``; all versions), by which
   ``torch.compile(backend="inductor")`` compiles a graph. Torch can force a backend, but then all others are
   replaced as well, and Inductor's options are lost. In force while anybody takes such graphs.
6. ``torch.fx.proxy.TracerBase.create_node`` (``seeing_nodes``; all versions), by which a tracer makes a node.
   A tracer can note Python's stack, but AOTAutograd's export has none asked to. In force while anybody sees.
7. ``cpp_pybinding`` and ``wait`` of ``torch._inductor.async_compile.AsyncCompile`` (``kernels_later``; all
   versions), by which a generated module has its kernels compiled and waits for them. Torch compiles those of
   a forward before it lowers the backward, whose code may ask for another plan. In force while any thread is
   inside.
8. ``decide_layout`` of ``torch._inductor.ir.ComputedBuffer`` (``layouts_from_sources``; all versions), by
   which the order of a buffer's elements is chosen, after the orders of what it reads. Torch does not choose
   those first, and takes them for the order of the sizes. In force while any thread is inside.
9. ``codegen_group`` of ``torch._inductor.codegen.cpp.KernelGroup`` (``transposing_apart``; all versions), by
   which the text of a C++ kernel is written. Of kernels that transpose two tiles of 16-bit numbers, GCC 12.2
   makes code that gets both wrong. In force while any thread is inside.

No patches are: ``choose_saved_values_set`` with a minimum cut of ours, which nobody sees but who calls it
(``choosing_by``; all versions); torch's own settings, which it takes back itself; and what torch asks to be
handed, such as choices for Inductor (``compilers.py``).
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import networkx as nx
import torch
from torch._functorch import partitioners
from torch.autograd import profiler
from torch.fx.proxy import TracerBase

from fxremat._torch.stand_ins import StandIn, having, standing_in

__all__ = [
    "add_missing_implementation",
    "choosing_by",
    "generating",
    "kernels_later",
    "layouts_from_sources",
    "making_way",
    "making_way_no_more",
    "reading_code",
    "seeing_nodes",
    "taking_inductor",
    "transposing_apart",
    "watching_passes",
]

Cut = Callable[[Any, Any, Any], Any]

_lock = threading.Lock()


# --- Generated code ---------------------------------------------------------------------------------

_reader: ContextVar[Callable[[str], None] | None] = ContextVar("fxremat_reader", default=None)


class _Saver(StandIn):
    """Hands a text to what was there before, and to the reader of the thread that generated it."""

    def __call__(self, text: str) -> None:
        if self.before is not None:
            self.before(text)
        read = _reader.get()
        if read is not None and self.inside:
            read(text)


@contextlib.contextmanager
def reading_code(read: Callable[[str], None]) -> Iterator[None]:
    """Have the code read that Inductor generates in this thread; that of a graph from a cache is left out.

    Any number of threads may be inside at once, if nobody else sets ``save_output_code`` meanwhile. Who does
    is not overruled: theirs stays, and whether it calls ours is up to them.
    """
    from torch._inductor.graph import GraphLowering

    with standing_in(GraphLowering, "save_output_code", _Saver), having(_reader, read):
        yield


# --- Layouts ----------------------------------------------------------------------------------------

_from_sources: ContextVar[bool] = ContextVar("fxremat_from_sources", default=False)


class _Decider(StandIn):
    """Chooses the order of the elements of what a buffer reads, and then that of its own."""

    def __call__(self, buffer: Any) -> None:
        waiting = [buffer]
        while waiting:
            sources = _not_laid_out(waiting[-1]) if _from_sources.get() else []
            if sources:
                waiting += sources
            else:
                self.before(waiting.pop())


def _not_laid_out(buffer: Any) -> list[Any]:
    """What a buffer reads whose layout is not chosen, as long as its own is not either."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    def is_open(each: Any) -> bool:
        return isinstance(each, ir.ComputedBuffer) and isinstance(each.layout, ir.FlexibleLayout)

    names = buffer.get_read_names() if is_open(buffer) else ()
    return list(filter(is_open, map(V.graph.name_to_buffer.get, names)))


@contextlib.contextmanager
def layouts_from_sources() -> Iterator[None]:
    """Have Inductor lay out a buffer of this thread's graphs by how what it reads will lie.

    It chooses when something asks, such as a sum over a buffer, and for what was not asked for yet it goes by
    the order of the sizes. What is computed again is, in the midst of images that lie channels last; the loop
    then lies otherwise than all that it is read with, and Inductor makes two kernels of one.
    """
    from torch._inductor import ir

    with standing_in(ir.ComputedBuffer, "decide_layout", _Decider), having(_from_sources, True):
        yield


# --- Tiles ------------------------------------------------------------------------------------------

_apart: ContextVar[bool] = ContextVar("fxremat_apart", default=False)

_TRANSPOSE = re.compile(r"transpose_mxn<at::(?:BFloat16|Half),[^;]*;")
_FUNCTION = '[&]() __attribute__((noinline, flatten, optimize("no-tree-slp-vectorize"))) { %s }();'


class _Writer(StandIn):
    """Writes the text of a C++ kernel, with such tiles transposed in functions of their own."""

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        from torch._inductor import cpp_builder

        text: str = self.before(*args, **kwargs)
        if not _apart.get() or not cpp_builder.is_gcc():
            return text
        return _TRANSPOSE.sub(lambda found: _FUNCTION % found[0], text)


@contextlib.contextmanager
def transposing_apart() -> Iterator[None]:
    """Have GCC compile the transposition of 16-bit tiles in kernels of this thread's graphs by itself.

    For vectors of 512 bits the tiles are 32 by 32. Where a kernel has two, GCC 12.2 with ``-O3`` vectorizes
    what is vectorized already (its pass ``tree-slp-vectorize``), and the result is another. Plans lay values
    out that Inductor on its own has not read across their order, so its error would be a plan's.
    """
    from torch._inductor.codegen.cpp import KernelGroup

    with standing_in(KernelGroup, "codegen_group", _Writer), having(_apart, True):
        yield


@contextlib.contextmanager
def generating(read: Callable[[str], None]) -> Iterator[None]:
    """Have this thread's graphs generated as fxremat wants them, and their code read."""
    with reading_code(read), layouts_from_sources(), transposing_apart():
        yield


# --- Kernels ----------------------------------------------------------------------------------------

_modules: ContextVar[list[tuple[Any, dict[str, Any]]] | None] = ContextVar("fxremat_modules", default=None)


class _Kernel:
    """Stands in a generated module for a C++ kernel whose compilation has not begun."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start

    @functools.cached_property
    def started(self) -> Any:
        """The kernel, or what will have it; its compilation begins when this is first read."""
        return self._start()

    def __call__(self, *args: Any) -> Any:
        """Run it, for who can't wait, such as a benchmark of its module."""
        kernel = self.started.result() if hasattr(self.started, "result") else self.started
        return kernel(*args)


def _start(module: dict[str, Any]) -> None:
    """Begin to compile the kernels of a module that stands still."""
    kernels = {name: each.started for name, each in module.items() if isinstance(each, _Kernel)}
    module.update(kernels)


class _Later(StandIn):
    """In the place of ``cpp_pybinding``."""

    def __call__(self, compiler: Any, *args: Any) -> Any:
        start = functools.partial(self.before, compiler, *args)
        return start() if _modules.get() is None else _Kernel(start)


class _Waiter(StandIn):
    """In the place of ``wait``; modules with other kernels as well do not wait for theirs."""

    def __call__(self, compiler: Any, module: dict[str, Any]) -> None:
        modules = _modules.get()
        if modules is not None and not any(hasattr(each, "result") for each in module.values()):
            modules.append((compiler, module))
            return
        _start(module)
        self.before(compiler, module)


@contextlib.contextmanager
def kernels_later() -> Iterator[None]:
    """Have C++ kernels of this thread's graphs compiled when it leaves, all at once; none behind an error."""
    from torch._inductor.async_compile import AsyncCompile

    modules: list[tuple[Any, dict[str, Any]]] = []
    with (
        standing_in(AsyncCompile, "cpp_pybinding", _Later),
        standing_in(AsyncCompile, "wait", _Waiter),
        having(_modules, modules),
    ):
        yield
    for _, module in modules:
        _start(module)
    for compiler, module in modules:
        compiler.wait(module)


# --- Control dependencies ---------------------------------------------------------------------------


def _run_dependent(dependencies: object, subgraph: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What an operator with control dependencies computes."""
    return subgraph(*args, **kwargs)


def add_missing_implementation() -> None:
    """Let the operator with control dependencies take operands that require gradients."""
    from torch._inductor.fx_passes.control_dependencies import control_deps

    key = torch._C.DispatchKey.Autograd
    with _lock:
        if key not in control_deps.py_kernels:
            control_deps.py_impl(key)(_run_dependent)


# --- Backward passes --------------------------------------------------------------------------------

_watchers: list[tuple[Callable[[Sequence[Any]], None], Callable[[], None]]] = []


class _Passes:
    """Stands in the place of the function that runs a backward pass while anybody watches."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self.before = before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watchers = tuple(_watchers)
        for begins, _ in watchers:
            begins(args[0] if args and isinstance(args[0], Sequence) else ())
        try:
            return self.before(*args, **kwargs)
        finally:
            for _, ended in watchers:
                ended()


def watching_passes(begins: Callable[[Sequence[Any]], None], ended: Callable[[], None]) -> Callable[[], None]:
    """Have functions called before and behind each backward pass, in the thread that asks for it.

    Args:
        begins: Called with what the pass starts from: tensors, or edges of autograd's graph.
        ended: Called behind it, whether it succeeded or not.

    Returns:
        What ends it; to be called once.
    """
    watcher = (begins, ended)

    def end() -> None:
        with _lock:
            _watchers[:] = [each for each in _watchers if each is not watcher]
            passes = torch.autograd._engine_run_backward
            if not _watchers and isinstance(passes, _Passes):
                torch.autograd._engine_run_backward = passes.before

    try:
        with _lock:
            _watchers.append(watcher)
            if not isinstance(torch.autograd._engine_run_backward, _Passes):
                torch.autograd._engine_run_backward = _Passes(torch.autograd._engine_run_backward)
    except BaseException:  # whatever is interrupted is taken back
        end()
        raise
    return end


# --- Profilers --------------------------------------------------------------------------------------

_STARTERS = ("_prepare_profiler", "_enable_profiler")
_ways: list[Callable[[], None]] = []


class _Starter:
    """Stands in the place of a function that starts a profiler while anybody is to make way for it."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self.before = before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for make_way in tuple(_ways):
            make_way()
        return self.before(*args, **kwargs)


def making_way(make_way: Callable[[], None]) -> None:
    """Have a function called before a profiler of torch's starts, in the thread that starts it."""
    with _lock:
        _ways.append(make_way)
        for name in _STARTERS:
            starter = getattr(profiler, name)
            if not isinstance(starter, _Starter):
                setattr(profiler, name, _Starter(starter))


def making_way_no_more(make_way: Callable[[], None]) -> None:
    """Have that function called no longer; nothing where it is not by now."""
    with _lock:
        _ways[:] = [each for each in _ways if each is not make_way]
        for name in _STARTERS if not _ways else ():
            starter = getattr(profiler, name)
            if isinstance(starter, _Starter):
                setattr(profiler, name, starter.before)


# --- Nodes that are traced ----------------------------------------------------------------------------

See = Callable[[torch.fx.Node], None]
_see: ContextVar[See | None] = ContextVar("fxremat_see", default=None)


class _Maker(StandIn):
    """Shows a node that a tracer has made."""

    def __call__(self, tracer: Any, *args: Any, **kwargs: Any) -> Any:
        node = self.before(tracer, *args, **kwargs)
        see = _see.get()
        if see is not None:
            see(node)
        return node


@contextlib.contextmanager
def seeing_nodes(see: See) -> Iterator[None]:
    """Have each node seen that a tracer makes in this thread, as soon as it is made."""
    with standing_in(TracerBase, "create_node", _Maker), having(_see, see):
        yield


# --- What Inductor is to compile ----------------------------------------------------------------------

Take = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
_takes: list[Take] = []
_replaced: list[tuple[Callable[..., Any], Callable[..., Any]]] = []  # a wrapper's call, and ours in its place


def _taking(before: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in the place of a wrapper's ``__call__`` while anybody takes its graphs."""

    @functools.wraps(before)
    def call(self: Any, module: Any, inputs: Any, **kwargs: Any) -> Any:
        is_own = type(self) is torch._TorchCompileInductorWrapper  # its heirs compile ahead of time
        config = {**self.config, **(kwargs.get("config_patches") or {})}
        for take in tuple(_takes) if is_own else ():
            taken = take(module, inputs, config)
            if taken is not NotImplemented:
                return taken
        return before(self, module, inputs, **kwargs)

    return call


def taking_inductor(take: Take) -> Callable[[], None]:
    """Have a function asked for each graph that ``torch.compile(backend="inductor")`` is to compile.

    Args:
        take: Called with the graph, its inputs and Inductor's options, those of its mode included, in the
            thread that compiles; it compiles the graph, or returns ``NotImplemented`` to leave it.

    Returns:
        What ends it; to be called once.
    """
    wrapper: Any = torch._TorchCompileInductorWrapper
    with _lock:
        if not _takes:
            before = wrapper.__call__
            wrapper.__call__ = _taking(before)
            _replaced.append((before, wrapper.__call__))
        _takes.append(take)

    def end() -> None:
        with _lock:
            _takes.remove(take)
            for before, ours in [] if _takes else [_replaced.pop()]:
                if wrapper.__call__ is ours:  # else somebody else's stands there by now, and stays
                    wrapper.__call__ = before

    return end


# --- The minimum cut --------------------------------------------------------------------------------


class _Networkx:
    """networkx, but for its minimum cut."""

    def __init__(self, cut: Cut) -> None:
        self.minimum_cut = cut

    def __getattr__(self, name: str) -> Any:
        return getattr(nx, name)


def choosing_by(cut: Cut) -> Callable[..., Any]:
    """A copy of PyTorch's ``choose_saved_values_set`` that finds its minimum cut by this function.

    The two functions concerned are copied with names of their own to look up, so that torch, networkx and
    other threads go on as they are. Up to torch 2.14 ``solve_min_cut`` imports networkx for each call, and
    gets one with our cut; from then on it calls ``minimum_cut`` of its module.
    """
    names = {**vars(partitioners), "minimum_cut": cut, "__builtins__": {**vars(builtins)}}

    def import_(name: str, *args: Any, **kwargs: Any) -> Any:
        return _Networkx(cut) if name == "networkx" else builtins.__import__(name, *args, **kwargs)

    names["__builtins__"]["__import__"] = import_
    for name in ("solve_min_cut", "choose_saved_values_set"):
        function = getattr(partitioners, name)
        copy = FunctionType(function.__code__, names, name, function.__defaults__, function.__closure__)
        copy.__kwdefaults__ = function.__kwdefaults__
        names[name] = copy
    chooser: Callable[..., Any] = names["choose_saved_values_set"]
    return chooser
