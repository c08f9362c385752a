"""patches: what fxremat changes of torch is seen by those whom it concerns, and undone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codegen.cpp import KernelGroup
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ComputedBuffer
from torch._inductor.utils import fresh_cache
from torch.fx.proxy import TracerBase
from torch.testing import assert_close
from unseen import no_loops

from fxremat._torch.patches import (
    kernels_later,
    layouts_from_sources,
    reading_code,
    seeing_nodes,
    transposing_apart,
)


def generate(text: str) -> None:
    """What Inductor does when it has generated code."""
    if GraphLowering.save_output_code is not None:
        GraphLowering.save_output_code(text)


def test_code_is_read_inside_and_not_outside() -> None:
    """The innermost reader gets it; an error on the way out leaves nothing behind."""
    outer: list[str] = []
    inner: list[str] = []
    before = GraphLowering.save_output_code
    with pytest.raises(KeyError), reading_code(outer.append):
        generate("a")
        with reading_code(inner.append):
            generate("b")
        generate("c")
        raise KeyError
    generate("d")
    assert (outer, inner) == (["a", "c"], ["b"])
    assert GraphLowering.save_output_code is before


def code_of(function: Callable[..., Any], *inputs: Tensor) -> str:
    """What Inductor generates for a function, anew."""
    found: list[str] = []
    with fresh_cache(), reading_code(found.append):
        torch.compile(function, dynamic=False)(*inputs)
    return found[-1]


def test_a_buffer_lies_as_what_it_reads() -> None:
    """Inside; outside in the order of the sizes, where it reads one whose layout was not chosen yet."""

    def gradient(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        again = x.sigmoid()
        product = y * again.exp()
        return product.sum((0, 2, 3)), product * again

    images = [torch.randn(2, 8, 16, 16).to(memory_format=torch.channels_last) for _ in range(2)]
    in_order = "(2, 8, 16, 16), (2048, 256, 16, 1)"
    before = ComputedBuffer.decide_layout
    with no_loops():
        assert in_order in code_of(gradient, *images)
        torch.compiler.reset()
        with layouts_from_sources():
            assert in_order not in code_of(gradient, *images)
    assert ComputedBuffer.decide_layout is before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tiles_of_16_bits_are_transposed_right(dtype: torch.dtype) -> None:
    """A kernel that reads one twice across its order has what eager has."""

    def gradients(x: Tensor, y: Tensor) -> list[Tensor]:
        found = torch.where(x <= 0, y * x.exp(), y) * 2, y * x
        return [each.contiguous(memory_format=torch.channels_last) for each in found]

    x, y = (torch.randn(4, 32, 64, 64).to(dtype) for _ in range(2))
    inputs = (x.to(memory_format=torch.channels_last), y)
    before = KernelGroup.codegen_group
    with transposing_apart(), fresh_cache():
        found = torch.compile(gradients, dynamic=False)(*inputs)
    assert_close(found, gradients(*inputs), rtol=0.02, atol=0.02)  # tiles gone wrong are off by whole values
    assert KernelGroup.codegen_group is before


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources of the kernels that are compiled, in order; each kernel returns its source."""
    found: list[str] = []

    def start(compiler: AsyncCompile, types: list[str], source: str) -> Callable[[], str]:
        found.append(source)
        return lambda: source

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", start)
    return found


def load(*sources: str, **others: Any) -> dict[str, Any]:
    """What a generated module does when it is loaded; its names."""
    compiler = AsyncCompile()
    kernels = {source: compiler.cpp_pybinding([], source) for source in sources}
    module = {**kernels, **others}
    compiler.wait(module)
    return module


def test_kernels_are_compiled_at_the_end(started: list[str]) -> None:
    """Those of all modules; from then on the modules have them."""
    with kernels_later():
        forward = load("a", "b")
        backward = load("c")
        assert started == []
    assert started == ["a", "b", "c"]
    assert [forward["a"](), forward["b"](), backward["c"]()] == started == ["a", "b", "c"]
    load("d")
    assert started == ["a", "b", "c", "d"]


def test_no_kernel_is_compiled_behind_an_error(started: list[str]) -> None:
    """And nothing is left of it."""
    before = AsyncCompile.cpp_pybinding, AsyncCompile.wait
    with pytest.raises(KeyError), kernels_later():
        load("a")
        raise KeyError
    assert started == [] and (AsyncCompile.cpp_pybinding, AsyncCompile.wait) == before


def test_a_kernel_that_is_called_before_is_compiled_then(started: list[str]) -> None:
    """Once, however often."""
    with kernels_later():
        module = load("a", "b")
        assert [module["b"](), module["b"]()] == ["b", "b"] and started == ["b"]
    assert started == ["b", "a"]


def test_modules_with_other_kernels_wait_for_all(started: list[str]) -> None:
    """What compiles those may look at what has been compiled when their module is loaded."""
    other: Future[str] = Future()
    other.set_result("done")
    with kernels_later():
        module = load("a", other=other)
        assert started == ["a"] and module["a"]() == "a"


def test_nodes_are_seen_inside_and_not_outside() -> None:
    """Of whatever tracer, by the innermost; what was there before is there again."""
    outer: list[str] = []
    inner: list[str] = []
    before = TracerBase.create_node

    def trace() -> None:
        fx.symbolic_trace(torch.nn.ReLU())

    with pytest.raises(KeyError), seeing_nodes(lambda node: outer.append(node.op)):
        trace()
        with seeing_nodes(lambda node: inner.append(node.op)):
            trace()
        raise KeyError
    trace()
    assert outer == inner == ["placeholder", "call_function", "output"]
    assert TracerBase.create_node is before


def test_two_threads_read_their_own() -> None:
    """At the same time, and whoever leaves first."""
    together = Barrier(2)

    def generated(name: str) -> list[str]:
        found: list[str] = []
        together.wait()
        with reading_code(found.append):
            together.wait()
            generate(name)
            together.wait()
        together.wait()
        generate("too late")
        return found

    before = GraphLowering.save_output_code
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(generated, "ab")) == [["a"], ["b"]]
    assert GraphLowering.save_output_code is before


def test_what_others_set_is_called_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it was there before, or was set around ours and left there."""
    theirs: list[str] = []
    ours: list[str] = []

    def around(inner: Callable[[str], None] | None) -> Callable[[str], None]:
        return lambda text: theirs.append(text) or (inner(text) if inner is not None else None)

    first = around(None)
    monkeypatch.setattr(GraphLowering, "save_output_code", first)
    with reading_code(ours.append):
        generate("a")
        second = around(GraphLowering.save_output_code)
        GraphLowering.save_output_code = second
    assert GraphLowering.save_output_code is second
    generate("b")
    with reading_code(ours.append):
        generate("c")
    assert GraphLowering.save_output_code is second
    assert ours == ["a", "c"] and theirs == ["a", "b", "b", "c", "c"]
