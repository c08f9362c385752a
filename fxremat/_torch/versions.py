"""Versions: which torch fxremat is made for, and whether the installed one has the private names it uses.

The doors use names that torch may take away with any version. So they are looked for before the first door
opens, and those of Inductor, whose modules take seconds to import, when it is first asked to compile. What
torch has in some of the versions alone is not listed, and looked for where it is used.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable

import torch

__all__ = ["NEWEST", "OLDEST", "check", "is_supported", "missing", "require", "supported"]

OLDEST, NEWEST = (2, 11), (2, 15)  # what pyproject.toml installs

# By module, the names that the doors use.
NAMES: dict[str, tuple[str, ...]] = {
    "torch": ("_TorchCompileInductorWrapper",),
    "torch._C": (
        "DispatchKey",
        "_TorchDispatchModeKey",
        "_autograd.SavedTensor.data",
        "_autograd._disable_profiler_legacy",
        "_autograd._enable_profiler_legacy",
        "_autograd._get_current_graph_task_keep_graph",
        "_autograd._profiler_enabled",
        "_autograd._top_saved_tensors_default_hooks",
        "_current_graph_task_id",
        "_dynamo.eval_frame._debug_get_cache_entry_list",
        "_dynamo.eval_frame.reset_code",
        "_dynamo.guards",
        "_get_dispatch_mode",
        "_profiler._ExperimentalConfig",
        "_profiler._RecordFunctionFast",
    ),
    "torch._dynamo": ("config.patch", "reset"),
    "torch._dynamo.backends.common": ("aot_autograd",),
    "torch._dynamo.backends.debugging": ("boxed_nop",),
    "torch._dynamo.convert_frame": ("compile_lock", "register_bytecode_hook"),
    "torch._dynamo.eval_frame": ("skip_code",),
    "torch._dynamo.exc": ("ShortenTraceback",),
    "torch._dynamo.guards": ("DeletedGuardManagerWrapper",),
    "torch._dynamo.pgo": ("get_code_state",),
    "torch._functorch._aot_autograd.descriptors": (
        "BufferAOTInput",
        "ParamAOTInput",
        "PlainAOTInput",
        "PlainAOTOutput",
    ),
    "torch._functorch.aot_autograd": ("aot_export_joint_with_descriptors",),
    "torch._functorch.compile_utils": ("fx_graph_cse",),
    "torch._functorch.config": ("cse", "patch", "unsafe_allow_optimization_of_collectives"),
    "torch._functorch.partitioners": (
        "_extract_fwd_bwd_modules",
        "_has_tag_is_forward",
        "_must_be_in_backward",
        "choose_saved_values_set",
        "classify_nodes",
        "cleanup_recompute_tags",
        "default_partition",
        "force_save_bw_mutation_src",
        "force_save_collectives",
        "force_save_effectful_ops",
        "has_recomputable_ops",
        "min_cut_rematerialization_partition",
        "solve_min_cut",
        "thread_graphsafe_rng_from_hops",
    ),
    "torch._guards": (
        "CompileContext.current_compile_id",
        "TracingContext.try_get",
        "active_fake_mode",
        "detect_fake_mode",
        "tracing",
    ),
    "torch._higher_order_ops.effects": ("has_effects", "with_effects"),
    "torch._inductor.custom_graph_pass": ("CustomPartitionerFn", "get_hash_for_files"),
    "torch._inductor.runtime.cache_dir_utils": ("cache_dir",),
    "torch._logging": ("_internal.register_log", "trace_structured"),
    "torch._ops": ("HigherOrderOperator", "OpOverload", "OpOverloadPacket"),
    "torch._subclasses.fake_tensor": ("FakeTensor", "FakeTensorMode"),
    "torch.autograd": ("_engine_run_backward", "_get_sequence_nr"),
    "torch.compiler": ("_is_compiling_flag",),
    "torch.cuda.memory": ("_record_memory_history", "_snapshot"),
    "torch.fx.proxy": ("TracerBase.create_node",),
    "torch.utils._ordered_set": ("OrderedSet",),
    "torch.utils._python_dispatch": (
        "TorchDispatchMode",
        "_disable_current_modes",
        "is_traceable_wrapper_subclass",
    ),
    "torch.utils._pytree": ("tree_leaves", "tree_map_only"),
}

# The same of Inductor, and of the parts of Dynamo that only compilation imports.
INDUCTORS: dict[str, tuple[str, ...]] = {
    "torch._dynamo.device_interface": (
        "CudaInterface",
        "device_interfaces",
        "get_interface_for_device",
        "register_interface_for_device",
    ),
    "torch._dynamo.utils": ("detect_fake_mode",),
    "torch._inductor": ("list_mode_options",),
    "torch._inductor.async_compile": ("AsyncCompile.cpp_pybinding", "AsyncCompile.wait"),
    "torch._inductor.codecache": ("CppCodeCache.load", "FxGraphCache._get_tmp_dir_for_key"),
    "torch._inductor.codegen.cpp": ("KernelGroup.codegen_group",),
    "torch._inductor.compile_fx": ("compile_fx", "compile_fx_inner"),
    "torch._inductor.config": (
        "_post_fusion_custom_pass",
        "cpp_wrapper",
        "get_config_copy",
        "patch",
        "realize_opcount_threshold",
        "triton.cudagraphs",
    ),
    "torch._inductor.cpp_builder": ("is_gcc",),
    "torch._inductor.decomposition": ("select_decomp_table",),
    "torch._inductor.fx_passes.control_dependencies": ("control_deps", "preserve_node_ordering"),
    "torch._inductor.fx_passes.joint_graph": ("joint_graph_passes",),
    "torch._inductor.graph": ("GraphLowering.decide_layout_opt", "GraphLowering.save_output_code"),
    "torch._inductor.ir": (
        "ComputedBuffer.decide_layout",
        "ConcatKernel",
        "ExternKernel",
        "FlexibleLayout",
        "MultiOutputLayout",
        "NoneLayout",
    ),
    "torch._inductor.inductor_prims": ("force_stride_order",),
    "torch._inductor.kernel.conv": ("convolution",),
    "torch._inductor.lowering": ("constrain_to_fx_strides", "maybe_layout_constraints"),
    "torch._inductor.scheduler": ("BaseSchedulerNode", "NopKernelSchedulerNode"),
    "torch._inductor.utils": ("use_scatter_fallback",),
    "torch._inductor.virtualized": ("V",),
}


def is_supported(version: str) -> bool:
    """Whether a version of torch is one that fxremat is made for.

    >>> [is_supported(version) for version in ("2.10.1", "2.11.0", "2.15.0+cpu", "2.16.0a0", "3.0")]
    [False, True, True, False, False]
    """
    major, minor, *_ = version.split(".")
    return OLDEST <= (int(major), int(minor)) <= NEWEST


def supported() -> str:
    """The versions, for a person.

    >>> supported()
    '2.11 to 2.15'
    """
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
    return f"{oldest} to {newest}"


def missing(names: dict[str, tuple[str, ...]]) -> list[str]:
    """Which of the names this torch lacks.

    >>> missing({"math": ("pi", "tau.real", "pie"), "maths": ("pi",)})
    ['math.pie', 'maths']
    """
    found = []
    for module, attributes in names.items():
        try:
            value = importlib.import_module(module)
        except ImportError:
            found.append(module)
            continue
        found += [f"{module}.{each}" for each in attributes if not _has(value, each.split("."))]
    return found


def _has(value: object, path: Iterable[str]) -> bool:
    for name in path:
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


def require(names: dict[str, tuple[str, ...]]) -> None:
    """Refuse a torch that lacks any of the names.

    Raises:
        ImportError: It does.
    """
    lacking = missing(names)
    if lacking:
        raise ImportError(
            f"fxremat is made for torch {supported()}. torch {torch.__version__} lacks what it uses: "
            f"{', '.join(lacking)}. Install one of these versions, or a newer fxremat."
        )


def check() -> None:
    """Refuse a torch that lacks what the doors need, and warn of one that nobody has tried.

    Not while torch is being imported itself, which imports packages that ``TORCH_LOGS`` names.

    Raises:
        ImportError: A name is missing.
    """
    if getattr(torch.__spec__, "_initializing", False):
        return
    require(NAMES)
    if not is_supported(torch.__version__):
        warnings.warn(
            f"fxremat is made for torch {supported()}, and this is {torch.__version__}", stacklevel=3
        )
