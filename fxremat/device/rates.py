"""Rates: how fast a device computes, copies and launches, for the roofline of ``predict/cost.py``.

The rates of a device that is present are measured, once for each device, version of torch, number of
threads and precision of float32 products, and kept in a ledger: products of square matrices, copies of a
block that no cache holds, calls of an operator of four elements. That takes about a second. Each figure is
the best of several, since noise only ever slows down, and is rounded to two digits, so that what little
noise remains seldom shows; what is kept is not measured again.

Rates may be *pinned*: a file ``pinned.json`` in the folder of the ledgers is taken at its word, as in
``{"cpu": {"flops_per_second": 66e9, ...}}``, by kind of device and with all fields of ``Rates``, or refused.
So several machines can be made to plan alike. Processes that train together do so anyway: those of a process
group all have the rates of the one that needed them first.

Rates may be *supposed* as well: while a plan is made for a card that is not there but known (``cards.py``).

Another device that is not there (a graph traced for another machine, or for none) has the rates of a table:
of one CPU and one GPU. The CPU's were measured by hand on 2 cores of an AMD EPYC of the Zen 4 line, float64
taken for half of float32; the GPU's are the data sheet's of an H100 SXM at half of their peak. The table also
serves while a profiler is recording: what is timed then is the profiler, and on a GPU the user's figures
would hold our products.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import platform
import reprlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from fxremat._torch import processes, profilers
from fxremat.device import ledger
from fxremat.errors import RatesError

__all__ = [
    "CPU",
    "CUDA",
    "KEY",
    "PINNED",
    "REFUSALS",
    "Rates",
    "alone",
    "facts",
    "is_present",
    "present",
    "rates",
    "seconds_per_call",
    "source",
    "supposing",
    "table",
]

T = TypeVar("T")

PINNED = "pinned.json"
CLOCK = "thread"  # what seconds on a CPU are of: figures by another clock are measured anew
KEY = "rates"  # in a device's ledger
DIGITS = 2

# What a device raises that cannot run something: no kernel for a dtype, no memory left.
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)

BATCH_SECONDS = 2e-4  # of calls between two looks at the clock
ROUNDS, ENOUGH_SECONDS = 10, 0.05  # batches of which the best counts; fewer if they have taken so long
LEAST_ROUNDS = 3
PRODUCT_SECONDS = 4e-3  # a product that takes so long says what large ones take
COPIED_BYTES = 128 << 20  # more than caches hold, in turn ...
PIECES = {"cpu": 8, "cuda": 2}  # ... by pieces that take a CPU few milliseconds: the best are undisturbed
LARGEST = {"cpu": 2048, "cuda": 4096}  # rows of a matrix: 64 MiB in float32


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of a device.

    Attributes:
        flops_per_second: Of products in float32.
        half_flops_per_second: Of products in bfloat16, or in float16 where that is faster.
        double_flops_per_second: Of products in float64.
        bytes_per_second: Read and written by a copy, both counted.
        launch_seconds: What calling an operator takes at least.
    """

    flops_per_second: float
    half_flops_per_second: float
    double_flops_per_second: float
    bytes_per_second: float
    launch_seconds: float


CPU = Rates(66e9, 66e9, 33e9, 16.6e9, 3.3e-6)
CUDA = Rates(33e12, 495e12, 33e12, 1.7e12, 4e-6)


_supposed: ContextVar[dict[str, Rates]] = ContextVar("fxremat_supposed_rates")


@contextlib.contextmanager
def supposing(kind: str, given: Rates) -> Iterator[None]:
    """Have all devices of a kind these rates, for this thread, while inside."""
    token = _supposed.set({**_supposed.get({}), kind: given})
    try:
        yield
    finally:
        _supposed.reset(token)


def rates(device: torch.device) -> Rates:
    """The rates of a device: supposed, pinned, kept, measured now, or those of the table.

    Raises:
        RatesError: Rates are pinned, but can't be taken at their word.
    """
    found = _supposed.get({}).get(device.type) or _pinned().get(device.type)
    if found is not None:
        return found
    if not is_present(device):
        return table(device)
    book = ledger.open_ledger(facts(device))
    if book.first(KEY, _parsed) is None and not profilers.is_profiling():
        book.add({KEY: asdict(_measured(device))})
    return _shared(device.type, book.first(KEY, _parsed) or table(device))


def _shared(kind: str, own: Rates) -> Rates:
    """The rates that all processes of a group have for a kind of device: those of the first that asked."""
    group = processes.group()
    if group is None:
        return own
    try:
        found = group.first(f"rates/{kind}", json.dumps(asdict(own)))
    except processes.StoreLost:
        return own
    return _parsed(json.loads(found)) or own


def source(device: torch.device) -> str:
    """Where ``rates`` has a device's rates from, for a person."""
    if device.type in _pinned():
        return f"pinned in {ledger.folder() / PINNED}"
    if not is_present(device):
        return "the table of fxremat"
    book = ledger.open_ledger(facts(device))
    if book.first(KEY, _parsed) is None:
        return "the table of fxremat"
    return f"kept in {book.path}" if book.is_kept else f"this process: {book.path} can't be written"


def table(device: torch.device) -> Rates:
    """The rates of a device that is not there."""
    return CPU if device.type in ("cpu", "meta") else CUDA


def is_present(device: torch.device) -> bool:
    """Whether operators can be run on the device."""
    if device.type in _supposed.get({}):
        return False
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())


def present() -> tuple[torch.device, ...]:
    """The CPU, and the current CUDA device once this process uses one."""
    cpu = torch.device("cpu")
    if not torch.cuda.is_initialized():
        return (cpu,)
    return cpu, torch.device("cuda", torch.cuda.current_device())


def facts(device: torch.device) -> dict[str, object]:
    """What figures of a present device depend on."""
    backend: Any  # one of torch's modules
    if device.type == "cuda":
        own = {"device": torch.cuda.get_device_name(device), "runtime": torch.version.cuda}
        backend = torch.backends.cuda
    else:
        own = {"device": _cpu_name(), "runtime": torch.backends.cpu.get_cpu_capability(), "clock": CLOCK}
        backend = torch.backends.mkldnn
    return {
        "kind": device.type,
        **own,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "float32": str(backend.matmul.fp32_precision),
    }


@functools.cache
def _cpu_name() -> str:
    """The CPU's model and its number of cores."""
    described = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            described[key.strip()] = value.strip()
    parts = [described.get("model name") or platform.processor() or platform.machine()]
    parts += [f"{key} {described[key]}" for key in ("cpu family", "model", "stepping") if key in described]
    return ", ".join([*parts, f"{os.cpu_count()} cores"])


def _pinned() -> dict[str, Rates]:
    """The rates that a person has written down, by kind of device; none where there is no file.

    Raises:
        RatesError: They can't be taken at their word.
    """
    path = ledger.folder() / PINNED
    if not os.path.lexists(path):  # or the folder may not be looked into
        return {}
    try:
        with ledger.open_regular(path) as file:
            given = json.loads(file.readall().decode("utf-8-sig"))
        if not isinstance(given, dict):
            raise ValueError(f"{reprlib.repr(given)} is no object")
        return {kind: _pin(kind, each) for kind, each in given.items()}
    except (OSError, ValueError, RecursionError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise RatesError(path, str(problem), json.dumps({"cpu": asdict(CPU)})) from error


def _pin(kind: str, given: object) -> Rates:
    """The rates that are pinned for a kind of device.

    Raises:
        ValueError: There is no such kind, or it doesn't have just the fields of ``Rates``, all positive.
    """
    if not _is_kind(kind):
        raise ValueError(f"torch knows no kind of device {kind!r}")
    if not isinstance(given, dict):
        raise ValueError(f"{kind!r} is {reprlib.repr(given)}, which is no object")
    names = [field.name for field in fields(Rates)]
    for name in [*given, *names]:
        if name not in names:
            raise ValueError(f"{kind!r} has {name!r}, which is no rate")
        if name not in given:
            raise ValueError(f"{kind!r} has no {name!r}")
        if ledger.positive(given[name]) is None:
            raise ValueError(f"{name!r} of {kind!r} is {reprlib.repr(given[name])}")
    return Rates(**{name: float(given[name]) for name in names})


def _is_kind(text: str) -> bool:
    try:
        return torch.device(text).type == text
    except RuntimeError:
        return False


def _parsed(given: object) -> Rates | None:
    """Rates from what was kept; None unless each is a positive number."""
    if not isinstance(given, dict):
        return None
    values = [ledger.positive(given.get(field.name)) for field in fields(Rates)]
    return None if None in values else Rates(*values)  # type: ignore[arg-type]


# --- Measuring ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def alone(devices: Iterable[torch.device]) -> Iterator[Callable[[Callable[[], T]], T]]:
    """Yield what runs a function as it is, whatever surrounds the caller.

    Tracing, autograd, autocast and profilers all belong to a thread, so the function runs in another one.

    Args:
        devices: Where operators run; the random states are restored there and on the CPU.
    """
    indices = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    thread = ThreadPoolExecutor(1, "fxremat", initializer=torch.set_grad_enabled, initargs=(False,))
    with torch.random.fork_rng(indices), thread:
        yield lambda function: thread.submit(function).result()


def seconds_per_call(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call among others of its like, the best of several batches, after one that is not timed.

    A batch has as many calls as the clock needs to be exact, and ends when the device has done all of them.
    On a CPU the seconds are those that this thread, which works beside those of an operator, was given of the
    processor: a process that has to wait for others would keep rates that are too low by hundreds of times.
    """
    call()
    passed, _ = _batch_seconds(call, 1, device)
    calls = max(1, math.ceil(BATCH_SECONDS / max(passed, 1e-9)))
    best, spent = math.inf, 0.0
    for done in range(ROUNDS):
        if done >= LEAST_ROUNDS and spent > ENOUGH_SECONDS:
            break
        passed, taken = _batch_seconds(call, calls, device)
        best, spent = min(best, taken / calls), spent + passed
    return best


def _batch_seconds(call: Callable[[], object], calls: int, device: torch.device) -> tuple[float, float]:
    """Seconds that passed, and that were taken."""
    _wait(device)
    start, began = time.perf_counter(), time.thread_time()
    for _ in range(calls):
        call()
    _wait(device)
    passed, taken = time.perf_counter() - start, time.thread_time() - began
    return passed, taken if device.type == "cpu" else passed


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measured(device: torch.device) -> Rates:
    with alone([device]) as run:
        found = run(functools.partial(_figures, device, table(device)))
    return Rates(*(float(f"{figure:.{DIGITS}g}") for figure in found))


def _figures(device: torch.device, known: Rates) -> tuple[float, ...]:
    """The rates' fields as they are measured, or as known where that can't be."""
    single = _flops_per_second(torch.float32, device, known.flops_per_second)
    halves = [_flops_per_second(dtype, device, 0.0) for dtype in (torch.bfloat16, torch.float16)]
    double = _flops_per_second(torch.float64, device, single / 2)
    copied = _bytes_per_second(device, known.bytes_per_second)
    launch = _launch_seconds(device, known.launch_seconds)
    return single, max(halves) or single, double, copied, launch


def _flops_per_second(dtype: torch.dtype, device: torch.device, otherwise: float) -> float:
    """Of square products that grow until they take long enough."""
    best = 0.0
    with contextlib.suppress(*REFUSALS):
        size = 128
        while True:
            matrix = torch.full((size, size), 0.5, dtype=dtype, device=device)
            seconds = seconds_per_call(functools.partial(torch.mm, matrix, matrix), device)
            best = max(best, 2 * size**3 / seconds)
            if seconds > PRODUCT_SECONDS or size == LARGEST[device.type]:
                break
            size *= 2
    return best or otherwise


def _bytes_per_second(device: torch.device, otherwise: float) -> float:
    with contextlib.suppress(*REFUSALS):
        pieces = PIECES[device.type]
        block = torch.full((pieces, COPIED_BYTES // pieces), 1, dtype=torch.uint8, device=device)
        pairs = itertools.cycle(zip(torch.full_like(block, 2), block, strict=True))
        seconds = seconds_per_call(lambda: torch.Tensor.copy_(*next(pairs)), device)
        return 2 * block[0].nbytes / seconds
    return otherwise


def _launch_seconds(device: torch.device, otherwise: float) -> float:
    with contextlib.suppress(*REFUSALS):
        four = torch.full((4,), 0.5, device=device)
        return seconds_per_call(lambda: torch.ops.aten.add.Tensor(four, four), device)  # as a graph does
    return otherwise
