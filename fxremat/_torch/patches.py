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

No patches are: ``choose_saved_values_set`` with a minimum cut of ours, which nobody sees but who calls it
(``choosing_by``; all versions); torch's own settings, which it takes back itself; and what torch asks to be
handed, such as choices for Inductor (``compilers.py``).
"""

from __future__ import annotations

import builtins
import contextlib
import functools
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

__all__ = [
    "add_missing_implementation",
    "choosing_by",
    "kernels_later",
    "making_way",
    "making_way_no_more",
    "reading_code",
    "seeing_nodes",
    "taking_inductor",
    "watching_passes",
]

Cut = Callable[[Any, Any, Any], Any]


# --- Generated code ---------------------------------------------------------------------------------

_lock = threading.Lock()
_reader: ContextVar[Callable[[str], None] | None] = ContextVar("fxremat_reader", default=None)


class _Saver:
    """Stands in the place of a ``save_output_code`` while any thread is inside of ``reading_code``.

    It hands a text to what was there before, and to the reader of the thread that generated it.

    Attributes:
        before: What it stands in the place of.
        inside: A key for each that is inside. None is left, and it reads nothing more, when it has gone.
    """

    def __init__(self, before: Callable[[str], None] | None) -> None:
        self.before = before
        self.inside: set[object] = set()

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

    key, saver, before = object(), None, _reader.get()
    try:  # whatever is interrupted is taken back
        with _lock:
            saver = GraphLowering.save_output_code
            if not isinstance(saver, _Saver):
                saver = GraphLowering.save_output_code = _Saver(saver)
            saver.inside.add(key)
        _reader.set(read)
        yield
    finally:
        _reader.set(before)
        with _lock:
            if isinstance(saver, _Saver):
                saver.inside.discard(key)
                if not saver.inside and GraphLowering.save_output_code is saver:
                    GraphLowering.save_output_code = saver.before


# --- Kernels ----------------------------------------------------------------------------------------

_modules: ContextVar[list[tuple[Any, dict[str, Any]]] | None] = ContextVar("fxremat_modules", default=None)
_inside: set[object] = set()
_compiling: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = []  # a name, what it was, what it is


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


def _starting_later(before: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in the place of ``cpp_pybinding``."""

    @functools.wraps(before)
    def cpp_pybinding(compiler: Any, *args: Any) -> Any:
        start = functools.partial(before, compiler, *args)
        return start() if _modules.get() is None else _Kernel(start)

    return cpp_pybinding


def _waiting_later(before: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in the place of ``wait``; modules with other kernels as well do not wait for theirs."""

    @functools.wraps(before)
    def wait(compiler: Any, module: dict[str, Any]) -> None:
        modules = _modules.get()
        if modules is not None and not any(hasattr(each, "result") for each in module.values()):
            modules.append((compiler, module))
            return
        _start(module)
        before(compiler, module)

    return wait


@contextlib.contextmanager
def kernels_later() -> Iterator[None]:
    """Have C++ kernels of this thread's graphs compiled when it leaves, all at once; none behind an error."""
    from torch._inductor.async_compile import AsyncCompile

    key, modules, before = object(), list[tuple[Any, dict[str, Any]]](), _modules.get()
    try:  # whatever is interrupted is taken back
        with _lock:
            if not _inside:
                for name, stand_in in (("cpp_pybinding", _starting_later), ("wait", _waiting_later)):
                    usual = getattr(AsyncCompile, name)
                    _compiling.append((name, usual, stand_in(usual)))
                    setattr(AsyncCompile, *_compiling[-1][::2])
            _inside.add(key)
        _modules.set(modules)
        yield
    finally:
        _modules.set(before)
        with _lock:
            _inside.discard(key)
            while _compiling and not _inside:
                name, usual, ours = _compiling.pop()
                if getattr(AsyncCompile, name) is ours:  # else somebody else's stands there by now, and stays
                    setattr(AsyncCompile, name, usual)
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


class _Maker:
    """Stands in the place of ``create_node`` while any thread is inside of ``seeing_nodes``.

    Attributes:
        before: What it stands in the place of.
        inside: A key for each that is inside.
    """

    def __init__(self, before: Callable[..., Any]) -> None:
        self.before = before
        self.inside: set[object] = set()

    def __get__(self, tracer: Any, owner: type) -> Any:
        return self if tracer is None else functools.partial(self, tracer)

    def __call__(self, tracer: Any, *args: Any, **kwargs: Any) -> Any:
        node = self.before(tracer, *args, **kwargs)
        see = _see.get()
        if see is not None:
            see(node)
        return node


@contextlib.contextmanager
def seeing_nodes(see: See) -> Iterator[None]:
    """Have each node seen that a tracer makes in this thread, as soon as it is made."""
    base: Any = TracerBase
    key, maker, before = object(), None, _see.get()
    try:  # whatever is interrupted is taken back
        with _lock:
            maker = base.create_node
            if not isinstance(maker, _Maker):
                maker = base.create_node = _Maker(maker)
            maker.inside.add(key)
        _see.set(see)
        yield
    finally:
        _see.set(before)
        with _lock:
            if isinstance(maker, _Maker):
                maker.inside.discard(key)
                if not maker.inside and base.create_node is maker:
                    base.create_node = maker.before


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
