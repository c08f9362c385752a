"""The door to private torch names of compilers: AOTAutograd, Inductor, and the modes that tracing runs in.

Tracing has state that all threads share, so Dynamo compiles under a lock. What is compiled without being
called by Dynamo, such as a graph that gets another plan, waits for that lock here.

See ``graphs.py`` for the other doors.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pathlib
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.convert_frame import compile_lock
from torch._inductor.custom_graph_pass import get_hash_for_files
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._ordered_set import OrderedSet

from fxremat._torch import graphs, patches, versions
from fxremat._torch.lowered import GeneratedCode, reader
from fxremat._torch.scheduling import Order, Origins, choices, running

__all__ = [
    "Order",
    "Origin",
    "autocast_types",
    "cacheable",
    "compile_as_inductor",
    "compile_id",
    "compile_lock",
    "compile_with_inductor",
    "compile_without_inductor",
    "fake_tensors",
    "gated",
    "hands_over_code",
    "inductor_joint_passes",
    "inductor_modes",
    "inductor_option_names",
    "input_names",
    "lays_out_channels_last",
    "max_operations",
    "missing_compiler",
    "order_after",
    "read_as",
    "records_cuda_graphs",
    "source_hash",
    "unlimited_recompilation",
]


def compile_without_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], partitioner: Callable[..., Any]
) -> Callable[..., Any]:
    """Run both graphs as they are, boxed, so that a value is freed after its last use."""
    compiler = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        partition_fn=partitioner,
        keep_inference_input_mutations=True,  # as Inductor and "aot_eager" have them, inside of the graph
    )
    with compile_lock:
        return compiler(module, inputs)


def compile_as_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile as ``torch.compile(backend="inductor")`` does."""
    from torch._inductor.compile_fx import compile_fx

    with compile_lock:
        return compile_fx(module, inputs, config_patches=dict(settings))  # type: ignore[return-value]


def _as_usual(graph: fx.GraphModule, inputs: Sequence[Any], is_backward: bool) -> Order | None:
    """Kernels run as Inductor has it."""
    return None


def compile_with_inductor(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    settings: Mapping[str, Any],
    may_fuse: Callable[[Origins, Origins], bool],
    outcome: Callable[[], object],
    read: Callable[[GeneratedCode], None],
    backward_now: bool = False,
    in_order: Callable[[fx.GraphModule, Sequence[Any], bool], Order | None] = _as_usual,
    key: str | None = "",
) -> Callable[..., Any]:
    """Compile with Inductor.

    Args:
        module: The graph of Dynamo's.
        inputs: Example inputs.
        settings: Configuration that also holds for the late backward.
        may_fuse: Whether Inductor may make one kernel of two groups of buffers, each given as the fx nodes
            that it was made for.
        outcome: Makes what is pickled with the graph's entry in AOTAutograd's cache; called when the forward
            is compiled, behind the partitioner, and again with the backward; not at all when that cache has
            the graph.
        read: Called with the code of each graph before its kernels are compiled, but for graphs from a cache;
            of one that is alike to another that was compiled lately, with the other's code.
            An exception ends the compilation, and what this one has put into Inductor's cache goes.
        backward_now: Whether the backward is compiled with the forward, and not when it first runs. On a CPU
            no kernel of either is compiled then before the code of both was read.
        in_order: Called with a forward or a backward, its example inputs, and whether it is a backward: how
            its kernels are to run, each where the first of its buffers stands in the graph; None where they
            run as Inductor has it.
        key: What caches are to tell apart besides the graphs themselves; None if they are to stay out of it.
    """
    versions.require(versions.INDUCTORS)
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.virtualized import V

    def compile_inner(*args: Any, **kwargs: Any) -> Any:
        is_backward = bool(kwargs.get("is_backward"))
        codes: list[GeneratedCode] = []  # none where Inductor's cache has the graph

        def read_one(code: GeneratedCode) -> None:
            codes.append(code)
            read(code)

        ordered = in_order(args[0], args[1], is_backward)
        with (
            contextlib.nullcontext() if ordered is None else running(ordered),
            V.set_choices_handler(choices(V.choices, may_fuse)),
            patches.generating(reader(read_one, is_backward)),
        ):
            compiled = compile_fx_inner(*args, **kwargs)
        entry = getattr(compiled, "_fx_graph_cache_key", None)
        if codes and entry is not None:
            written.append(entry)
            _remember(entry, codes[0])
        elif entry in _remembered:
            read(_remembered[entry])  # of another graph of this process, alike in this half
        context = torch._guards.TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            context.fw_metadata.fxremat_outcome = outcome()  # type: ignore[attr-defined]
        return compiled

    found = {**settings, **(_UNCACHED if key is None else cacheable(settings, key))}
    written: list[str] = []  # keys of Inductor's cache
    with compile_lock, contextlib.ExitStack() as stack, _uncached_on_error(written):
        if key is None:
            stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        if backward_now:
            stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
            stack.enter_context(torch._inductor.config.patch(found))  # as kernels are compiled in the end
            stack.enter_context(patches.kernels_later())
        return compile_fx(module, inputs, inner_compile=compile_inner, config_patches=found)  # type: ignore[return-value]


_remembered: dict[str, GeneratedCode] = {}  # by the keys of Inductor's cache
_MOST_REMEMBERED = 8  # they hold the graphs that they were made of


def _remember(entry: str, code: GeneratedCode) -> None:
    """Keep the code of a graph for others that are alike: such are the forwards of equal blocks."""
    _remembered.pop(entry, None)
    _remembered[entry] = code
    for oldest in list(_remembered)[:-_MOST_REMEMBERED]:
        del _remembered[oldest]


_UNCACHED = {"fx_graph_cache": False, "fx_graph_remote_cache": False}


@contextlib.contextmanager
def _uncached_on_error(entries: Sequence[str]) -> Iterator[None]:
    """Take entries with these keys out of Inductor's cache on this disk if an exception is raised inside.

    A forward that the cache had without its backward would be served without its code, which is to be read.
    """
    from torch._inductor.codecache import FxGraphCache

    try:
        yield
    except BaseException:
        for entry in entries:
            shutil.rmtree(FxGraphCache._get_tmp_dir_for_key(entry), ignore_errors=True)
        raise


def cacheable(settings: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The configuration by which graphs with control dependencies are cached.

    The operator is not declared cacheable. It is: its subgraph is a part of the graph's own text, and so of
    the key. Caches are told how the step is planned as well: a graph that another plan has, too, would be
    served without its code, which is to be read.
    """
    from torch._inductor import config
    from torch._inductor.fx_passes.control_dependencies import control_deps

    option = "unsafe_marked_cacheable_functions"
    marked = settings.get(option, getattr(config, option))
    return {option: {**marked, f"{control_deps.__module__}.{control_deps.__name__}": f"control_deps {key}"}}


def order_after(module: fx.GraphModule, waits: Mapping[fx.Node, fx.Node]) -> None:
    """Make each key run after its value, as a dependency that Inductor's scheduler honours."""
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering

    if not waits:
        return
    patches.add_missing_implementation()
    preserve_node_ordering(module.graph, {node: OrderedSet([dep]) for node, dep in waits.items()})
    module.graph.lint()
    module.recompile()


def gated(node: fx.Node) -> tuple[fx.Node, Sequence[Any]]:
    """The operator that a node is, or runs behind what it waits for (``order_after``), and its arguments."""
    from torch._inductor.fx_passes.control_dependencies import control_deps

    if node.target is not control_deps:
        return node, node.args
    part: Any = node.args[1]
    graph = getattr(node.graph.owning_module, part.target).graph
    operator = next(each for each in graph.nodes if each.op == "call_function")
    given = dict(zip(graph.find_nodes(op="placeholder"), node.args[2:], strict=True))  # each value once
    return operator, [given[each] if isinstance(each, fx.Node) else each for each in operator.args]


def read_as(reader: fx.Node, node: fx.Node, value: torch.Tensor, alone: bool = False) -> None:
    """Have a node read another in the order of this value's strides: as it is stored, or else a copy.

    Args:
        reader: Who reads it.
        node: What it reads.
        value: A tensor with these strides.
        alone: Whether those behind the reader go on reading the other one; it reads a copy of its own step.
    """
    from torch._inductor import inductor_prims

    order = [graphs.hint(step) or 0 for step in value.stride()]
    with reader.graph.inserting_before(reader):
        laid = reader.graph.call_function(inductor_prims.force_stride_order, (node, order))
    laid.meta = {**(reader if alone else node).meta, "val": value}
    node.replace_all_uses_with(laid, lambda user: user is reader or (not alone and user > reader))


def input_names(module: fx.GraphModule) -> list[str]:
    """What the user calls the inputs of a graph of Dynamo's, as far as it says, in order."""
    return [_name(node) for node in module.graph.find_nodes(op="placeholder")]


def _name(placeholder: fx.Node) -> str:
    """The input's place in the user's frame: ``self.layers.0.weight`` for a parameter, ``batch['x']``."""
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return str(placeholder.target)
    text = re.sub(r"^[LG]\['(\w+)'\]", r"\1", source.name)
    return re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", text)


def inductor_option_names() -> list[str]:
    """Every option that ``torch.compile(backend="inductor")`` takes."""
    from torch._inductor import config

    return list(config.get_config_copy())


def inductor_modes() -> dict[str, dict[str, Any]]:
    """The Inductor options that each ``mode`` of ``torch.compile`` stands for."""
    from torch._inductor import list_mode_options

    return list_mode_options()


def lays_out_channels_last(nodes: Sequence[fx.Node]) -> bool:
    """Whether Inductor has the convolutions of a graph with these nodes work channels last."""
    from torch._inductor.graph import GraphLowering

    module: Any = SimpleNamespace(graph=SimpleNamespace(nodes=nodes))
    return bool(GraphLowering.decide_layout_opt(module, is_inference=False))


def hands_over_code(settings: Mapping[str, Any]) -> bool:
    """Whether Inductor's code can be read under a configuration; not so for CUDA graphs and in C++."""
    from torch._inductor import config

    is_split = records_cuda_graphs(settings)
    return not (is_split or settings.get("cpp_wrapper", config.cpp_wrapper))


def records_cuda_graphs(settings: Mapping[str, Any]) -> bool:
    """Whether Inductor records CUDA graphs under a configuration."""
    from torch._inductor import config

    return bool(settings.get("triton.cudagraphs", config.triton.cudagraphs))


def max_operations(on_cpu: bool) -> int:
    """Of how many operations a loop may be that Inductor computes inside of others."""
    from torch._inductor import config

    given = config.realize_opcount_threshold
    if given is not None:
        return int(given)
    return int(config.realize_cpu_opcount_threshold if on_cpu else config._realize_opcount_threshold_default)


def source_hash(folder: pathlib.Path) -> bytes:
    """A hash of torch's version and of all sources of a package."""
    files = sorted(str(path) for path in folder.rglob("*.py"))
    return bytes(get_hash_for_files(tuple(files), torch.__version__))


# Which attributes say what of the program a placeholder stands for, and the parameters of a module. By these
# it is known which inputs stay in place, as CUDA graphs need it.
_SOURCE, _SOURCES = "_dynamo_source", "_param_name_to_source"


class Origin:
    """A graph of Dynamo's as it came, so that it can be compiled again when Dynamo has gone on.

    Its inputs are the fake tensors that it was traced with, which take no memory and have the same symbolic
    sizes; but for Python's numbers, whose tensors are as they were given, since fake ones forget the symbol.
    Compilers change the module that they are given, so each gets a copy.
    """

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._module = _copied(module)
        placeholders = self._module.graph.find_nodes(op="placeholder")
        self._numbers = {
            node: value for node, value in zip(placeholders, inputs, strict=True) if _may_be_number(value)
        }
        self._context = torch._guards.TracingContext.try_get()
        self._autocast, self._has_gradients = autocast_types(inputs), torch.is_grad_enabled()

    @property
    def inputs(self) -> list[Any]:
        """Its inputs."""
        placeholders = self._module.graph.find_nodes(op="placeholder")
        return [self._numbers.get(node, node.meta.get("example_value")) for node in placeholders]

    @property
    def text(self) -> str:
        """What it computes and is given, but for where the inputs come from."""
        graphs = [each.graph for each in self._module.modules() if isinstance(each, fx.GraphModule)]
        nodes = [(node.op, _target(node), node.args, node.kwargs) for graph in graphs for node in graph.nodes]
        return repr((nodes, [_described(each) for each in self.inputs]))

    @property
    def symbols(self) -> dict[int, Any]:
        """The symbols that stand for sizes, by the position of the input that tells the size."""
        values = {place: value for place, value in enumerate(self.inputs) if isinstance(value, torch.SymInt)}
        found = {place: value.node.expr for place, value in values.items()}
        return {place: each for place, each in found.items() if each.is_Symbol}

    def module(self) -> fx.GraphModule:
        """A copy of the module."""
        return _copied(self._module)

    @contextlib.contextmanager
    def resumed(self) -> Iterator[None]:
        """Compile as if Dynamo was at it still, but with nothing of what it does for the buckets of DDP."""
        context = copy.copy(self._context)
        if context is not None:
            context.ddp_optimizer_ctx = None
            context.fakify_first_call = False
        with contextlib.ExitStack() as stack:
            for device, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
            stack.enter_context(torch.set_grad_enabled(self._has_gradients))
            stack.enter_context(torch._guards.tracing(context))
            yield

    @property
    def outputs(self) -> list[Any]:
        """What it returns, fake."""
        (output,) = self._module.graph.find_nodes(op="output")
        return [leaf.meta.get("example_value") for leaf in output.all_input_nodes]


def autocast_types(inputs: Sequence[Any]) -> dict[str, torch.dtype | None]:
    """What autocast computes in around a graph with these inputs, by kind of device; None where it is off.

    Dynamo's graph does not tell, if autocast was entered outside of what it traced.
    """
    kinds = {each.device.type for each in inputs if isinstance(each, torch.Tensor)}
    return {
        kind: torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in sorted(kinds)
        if torch.amp.is_autocast_available(kind)
    }


def _target(node: fx.Node) -> str:
    """What a node calls, by a name that other processes have for it as well."""
    if isinstance(node.target, str) or not hasattr(node.target, "__qualname__"):
        return str(node.target)
    return f"{node.target.__module__}.{node.target.__qualname__}"


def _may_be_number(value: object) -> bool:
    """Whether an input may stand for a number of Python's: Dynamo makes a tensor of a ``float``."""
    if type(value) is not torch.Tensor:
        return False
    return value.dim() == 0 and value.dtype == torch.float64 and value.device.type == "cpu"


def _described(value: object) -> tuple[object, ...]:
    """What tells one input from another of the same size."""
    if not isinstance(value, torch.Tensor):
        return (type(value).__name__, str(value))
    return value.dtype, value.device, value.requires_grad, value.is_leaf, tuple(map(str, value.stride()))


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, copies)
    for node in module.graph.find_nodes(op="output"):
        graph.output(output).meta = dict(node.meta)
    for node in module.graph.find_nodes(op="placeholder"):
        if hasattr(node, _SOURCE):
            setattr(copies[node], _SOURCE, getattr(node, _SOURCE))
    copy = fx.GraphModule(module, graph)
    copy.meta.update(module.meta)
    if hasattr(module, _SOURCES):
        setattr(copy, _SOURCES, getattr(module, _SOURCES))
    return copy


def cache_folder() -> pathlib.Path | None:
    """Where compiled code is cached; None where the user has switched that off, or there is no place."""
    if torch.compiler.config.force_disable_caches:
        return None
    with contextlib.suppress(OSError):
        return pathlib.Path(cache_dir())
    return None


def compile_id() -> str:
    """Which compilation is under way, such as ``0/0``; empty outside of one."""
    current = torch._guards.CompileContext.current_compile_id()
    return "" if current is None else str(current)


def is_tracing() -> bool:
    """Whether a graph of Dynamo's is being compiled: what is called now, is called with fake tensors."""
    return torch._guards.TracingContext.try_get() is not None


def is_bucket() -> bool:
    """Whether the graph whose compilation is under way is one of those that DDP's buckets make of one."""
    context = torch._guards.TracingContext.try_get()
    return context is not None and context.ddp_optimizer_ctx is not None


def inductor_joint_passes(module: fx.GraphModule) -> fx.GraphModule:
    """Apply Inductor's joint-graph passes, as they run before a partitioner is called."""
    from torch._dynamo.utils import detect_fake_mode
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    values = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
    with V.set_fake_mode(detect_fake_mode(values)):
        return joint_graph_passes(module)


def unlimited_recompilation() -> contextlib.AbstractContextManager[None]:
    """Compile the same code for any number of models and options, where Dynamo would give up after a few."""
    patched: contextlib.AbstractContextManager[None] = torch._dynamo.config.patch(recompile_limit=2**20)
    return patched


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Make new tensors fake: they have a size and a device, and take no memory."""
    with FakeTensorMode():
        yield


def missing_compiler(device: str) -> str | None:
    """What Inductor lacks to generate code for the device, or None if it lacks nothing."""
    if torch.device(device).type == "cuda":
        return None if find_spec("triton") is not None else "Triton is not installed"
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    command, *_ = shlex.split(os.environ.get("CXX", "")) or [usual]
    return None if shutil.which(command) else f"the C++ compiler {command!r} was not found"
