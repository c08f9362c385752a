"""rates: what a device's rates are taken from, and that measuring them finds this machine's."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
from collections.abc import Callable
from dataclasses import asdict, astuple, replace
from pathlib import Path

import pytest
import torch
from devices import threads
from torch._subclasses.fake_tensor import FakeTensorMode

import fxremat
from fxremat.device import ledger, rates
from fxremat.device.rates import CPU, CUDA, PINNED, Rates
from fxremat.errors import RatesError

HERE = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which nothing is known."""
    monkeypatch.setenv("FXREMAT_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Rates]:
    """What would be measured, twice as fast each time; the list is what was."""
    found: list[Rates] = []

    def measure(device: torch.device) -> Rates:
        found.append(Rates(*(2 ** len(found) * each for each in astuple(CPU))))
        return found[-1]

    monkeypatch.setattr(rates, "_measured", measure)
    return found


def test_this_machine_is_measured(folder: Path) -> None:
    """Really: each rate is a positive number of two digits; products are no slower than copies.

    It works while a partitioner traces, under autocast, and leaves the random state alone.
    """
    state = torch.get_rng_state()
    with FakeTensorMode(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = rates.rates(HERE)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(each > 0 and float(f"{each:.2g}") == each for each in astuple(found))
    assert found.flops_per_second > found.bytes_per_second / 16
    assert rates.source(HERE).startswith(f"kept in {folder}")


def test_rates_are_measured_once_for_all_processes(folder: Path, measured: list[Rates]) -> None:
    """The next process reads what the first one found."""
    first = rates.rates(HERE)
    assert rates.rates(HERE) == first
    ledger._ledger.cache_clear()
    assert rates.rates(HERE) == first and len(measured) == 1


def test_each_number_of_threads_has_rates_of_its_own(folder: Path, measured: list[Rates]) -> None:
    """A product on two threads takes half as long."""
    first = rates.rates(HERE)
    with threads(torch.get_num_threads() + 1):
        assert rates.rates(HERE) != first
    assert rates.rates(HERE) == first and len(measured) == 2


def test_nothing_is_measured_under_a_profiler(
    folder: Path, measured: list[Rates], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table serves until then; what is known already is used."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert rates.rates(HERE) == CPU and measured == []
        assert rates.source(HERE) == "the table of fxremat"
    first = rates.rates(HERE)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert rates.rates(HERE) == first == measured[0]


def test_a_folder_that_cannot_be_written_to_serves_the_process(
    tmp_path: Path, measured: list[Rates], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured once in it."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FXREMAT_CACHE_DIR", str(tmp_path / "file"))
    assert rates.rates(HERE) == rates.rates(HERE) == measured[0] and len(measured) == 1
    assert rates.source(HERE).startswith("this process: ")


def test_pinned_rates_are_taken_at_their_word(folder: Path, measured: list[Rates]) -> None:
    """Also for devices that are not there."""
    pinned = replace(CPU, launch_seconds=1.0)
    text = json.dumps({"cpu": {**asdict(pinned), "launch_seconds": 1}, "xpu": asdict(pinned)})
    (folder / PINNED).write_text(text, encoding="utf-8-sig")  # as some editors write it
    assert rates.rates(HERE) == rates.rates(torch.device("xpu")) == pinned and measured == []
    assert rates.source(HERE) == f"pinned in {folder / PINNED}"


def test_what_is_not_pinned_is_measured(folder: Path, measured: list[Rates]) -> None:
    """A file may leave kinds of devices out."""
    (folder / PINNED).write_text("{}")
    assert rates.rates(HERE) == measured[0]


def pins(**changed: object) -> str:
    """A file of pins for the CPU with some fields changed; those that are None are left out."""
    own = {name: value for name, value in {**asdict(CPU), **changed}.items() if value is not None}
    return json.dumps({"cpu": own})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "Expecting value: line 1 column 1"),
        (pins()[:-1], "Expecting ',' delimiter"),
        ("[" * 100_000, "maximum recursion depth exceeded"),
        ("[]", "[] is no object"),
        ('{"cpu": 1}', "'cpu' is 1, which is no object"),
        (pins().replace("cpu", "gpu"), "torch knows no kind of device 'gpu'"),
        (pins().replace("cpu", "cuda:0"), "torch knows no kind of device 'cuda:0'"),
        (pins(flop_per_second=1), "'cpu' has 'flop_per_second', which is no rate"),
        (pins(launch_seconds=None), "'cpu' has no 'launch_seconds'"),
        (pins(launch_seconds=0), "'launch_seconds' of 'cpu' is 0."),
        (pins(launch_seconds="1"), "'launch_seconds' of 'cpu' is '1'."),
        (pins(launch_seconds=True), "'launch_seconds' of 'cpu' is True."),
        (pins(launch_seconds=float("nan")), "'launch_seconds' of 'cpu' is nan."),
        (pins(launch_seconds=float("inf")), "'launch_seconds' of 'cpu' is inf."),
        (pins(launch_seconds=10**400), "'launch_seconds' of 'cpu' is 1000"),
    ],
)
def test_pins_that_are_no_rates_are_refused(
    folder: Path, measured: list[Rates], text: str, problem: str
) -> None:
    """The message has the file, the fault and an example, which is itself taken at its word."""
    (folder / PINNED).write_text(text, encoding="utf-8")
    with pytest.raises(RatesError) as caught:
        rates.rates(HERE)
    message = str(caught.value)
    assert message.startswith(f"pinned rates, {folder / PINNED}: {problem}") and measured == []
    assert caught.value.path == folder / PINNED
    (folder / PINNED).write_text(message[message.index('{"cpu"') : message.index("}}") + 2])
    assert rates.rates(HERE) == CPU


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (os.mkfifo, "not a regular file"),
        (os.mkdir, "not a regular file"),
        (lambda path: path.symlink_to(path.parent / "nowhere"), "No such file or directory"),
        (lambda path: path.write_bytes(b"\xff"), "'utf-8' codec can't decode byte 0xff"),
    ],
    ids=["pipe", "folder", "nowhere", "bytes"],
)
def test_pins_that_cannot_be_read_are_refused(
    folder: Path, measured: list[Rates], make: Callable[[Path], None], problem: str
) -> None:
    """Nobody waits for the other end of a pipe."""
    make(folder / PINNED)
    with pytest.raises(RatesError, match=re.escape(f"{PINNED}: {problem}")):
        rates.source(HERE)


def test_pins_that_may_not_be_read_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there, so somebody relies on them."""
    (folder / PINNED).write_text(pins())
    opened = os.open

    def denied(name: object, *given: int, **options: object) -> int:
        if name == folder / PINNED:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(name, *given, **options)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(RatesError, match=re.escape(f"{PINNED}: Permission denied.")):
        rates.rates(HERE)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
def test_a_folder_that_may_not_be_looked_into_has_no_pins(
    folder: Path, measured: list[Rates], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the home of another user, which a service may have for its own."""
    folder.chmod(0o700)
    os.seteuid(65534)
    try:
        assert rates.rates(HERE) == measured[0]
        assert rates.source(HERE).startswith("this process: ")
    finally:
        os.seteuid(0)


def train(on_error: str) -> None:
    """A step of a compiled model."""
    options = {"compiler": "eager", "on_error": on_error}
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="fxremat", options=options)
    compiled(torch.ones(3, 2)).sum().backward()


def test_refused_pins_are_told_to_who_compiles(folder: Path) -> None:
    """As they are, or as the reason of a fallback."""
    (folder / PINNED).write_text("[]")
    with pytest.raises(RatesError, match=r"^pinned rates, .*: \[\] is no object"):
        train("raise")
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match=r"to PyTorch's partitioner: pinned rates, .*: \[\] is no object"):
        train("fallback")


def test_refused_pins_have_a_name_in_caches(folder: Path, measured: list[Rates]) -> None:
    """A fallback may be cached under it; other pins have another."""
    partition, names = fxremat.partitioner(on_error="fallback"), set()
    for text in ("[]", "[1]", pins(), pins(launch_seconds=1)):
        (folder / PINNED).write_text(text)
        assert partition.uuid() == partition.uuid() is not None
        names.add(partition.uuid())
    assert len(names) == 4


@pytest.mark.parametrize(
    "useless",
    ['"fast"', "[1]", "{}", *(json.dumps({**asdict(CPU), "launch_seconds": each}) for each in (-1, 10**400))],
    ids=["text", "list", "empty", "negative", "huge"],
)
def test_kept_rates_of_no_use_are_measured_again(folder: Path, measured: list[Rates], useless: str) -> None:
    """Once for all processes."""
    with ledger.open_ledger(rates.facts(HERE)).path.open("a") as file:
        file.write(f'["{rates.KEY}", {useless}]\n')
    for _ in range(2):
        ledger._ledger.cache_clear()
        assert rates.rates(HERE) == measured[0] and len(measured) == 1
        assert rates.source(HERE).startswith("kept in ")


def test_rates_that_could_not_be_written_are_not_called_kept(folder: Path, measured: list[Rates]) -> None:
    """The ledger is there, and the disk is full."""
    ledger.open_ledger(rates.facts(HERE))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        assert rates.rates(HERE) == measured[0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert rates.source(HERE).startswith("this process: ")


@pytest.mark.parametrize(("kind", "expected"), [("meta", CPU), ("xpu", CUDA), ("mps", CUDA)])
def test_devices_that_are_not_there_have_a_table(
    folder: Path, measured: list[Rates], kind: str, expected: Rates
) -> None:
    """Graphs may be traced for another machine."""
    assert rates.rates(torch.device(kind)) == expected and measured == []
    assert rates.source(torch.device(kind)) == "the table of fxremat"


def test_what_a_device_refuses_has_the_rate_of_what_it_can(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without products in half precision or float64, that of float32 stands in, and half of it."""

    def seconds_per_call(call: object, device: torch.device) -> float:
        return 1.0

    def only_single(
        size: object, fill: object, *, dtype: torch.dtype = torch.float32, device: object
    ) -> object:
        if dtype in (torch.float32, torch.uint8):
            return torch.ones(size, dtype=dtype)
        raise RuntimeError("not implemented")

    monkeypatch.setattr(rates, "seconds_per_call", seconds_per_call)
    monkeypatch.setattr(torch, "full", only_single)
    found = rates.rates(HERE)
    assert found.flops_per_second == found.half_flops_per_second == 2 * found.double_flops_per_second
    assert found.launch_seconds == 1.0


def test_seconds_per_call_are_the_best_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short calls are timed many at a time, long ones few times."""
    calls, now = [0], [0.0]
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(rates.time, clock, lambda: now[0])

    def call(seconds: float) -> None:
        calls[0] += 1
        now[0] += seconds * (3 if calls[0] < 5 else 1)  # the first ones are disturbed

    assert rates.seconds_per_call(lambda: call(1e-6), HERE) == pytest.approx(1e-6, rel=0.1)
    assert calls[0] > 10 * rates.ROUNDS
    calls[0] = 0
    assert rates.seconds_per_call(lambda: call(1.0), HERE) == pytest.approx(1.0)
    assert calls[0] == 2 + rates.LEAST_ROUNDS


def test_a_process_that_waits_for_others_is_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is given a hundredth of a processor, a hundred times as long passes."""
    now = [0.0]
    monkeypatch.setattr(rates.time, "perf_counter", lambda: 100 * now[0])
    monkeypatch.setattr(rates.time, "thread_time", lambda: now[0])

    def call() -> None:
        now[0] += 1e-4

    assert rates.seconds_per_call(call, HERE) == pytest.approx(1e-4)


def test_the_facts_of_this_machine() -> None:
    """All that a figure depends on, in text and numbers that a file can hold."""
    facts = rates.facts(HERE)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["kind"] == "cpu" and facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert "cores" in str(facts["device"])


@pytest.mark.gpu
def test_a_gpu_is_measured(folder: Path) -> None:
    """Its products are faster than its copies, and half precision is no slower than double."""
    found = rates.rates(torch.device("cuda", torch.cuda.current_device()))
    assert found.half_flops_per_second >= found.double_flops_per_second
    assert found.flops_per_second > found.bytes_per_second
