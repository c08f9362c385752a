"""device_budget: what a device has free for a step, and a part of that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

import fxremat
from fxremat._torch import optimizers, processes
from fxremat._torch.processes import Group
from fxremat.cli import command
from fxremat.device import capacity
from fxremat.driver import device_budget
from fxremat.errors import InvalidOptionError
from fxremat.fitting import card_budget
from fxremat.fitting.example import Example
from fxremat.options.options import Options, is_size, resolve_budget, share_of_device
from fxremat.step import agreement

CPU = torch.device("cpu")
MIB = 1 << 20
MEMORY = 256 * MIB


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    device_budget.forget()
    yield
    device_budget.forget()


class Device:
    """A stand-in for what a device says; the CPU's tensors are on it."""

    def __init__(self) -> None:
        self.free, self.states, self.asked = 100 * MIB, 0, 0

    def free_bytes(self, device: torch.device) -> int:
        self.asked += 1
        return self.free


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device of 256 MiB, of which 100 are free."""
    found = Device()
    monkeypatch.setattr(device_budget, "free_bytes", found.free_bytes)
    monkeypatch.setattr(device_budget, "capacity_bytes", lambda device: MEMORY)
    monkeypatch.setattr(optimizers, "states_to_come", lambda device, assumed: found.states)
    return found


def budget(text: str) -> Any:
    """What an option becomes for a graph on the CPU."""
    return device_budget.resolved(Options.parse({"budget": text}), [torch.ones(1)]).budget


# --- What may be asked for ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "share"), [("device", 1.0), ("90%", 0.9), (" 12.5 % ", 0.125), ("0.9", None), (0.9, None)]
)
def test_a_part_is_told_from_a_fraction(text: object, share: float | None) -> None:
    """A per cent sign means what the device has free; a number from 0 to 1 the peak without fxremat."""
    assert share_of_device(text) == share


@pytest.mark.parametrize("text", ["0%", "101%", "900 %"])
def test_no_part_is_refused(text: str) -> None:
    """More than all of it, or nothing."""
    with pytest.raises(InvalidOptionError, match="give above 0% and up to 100%"):
        Options.parse({"budget": text})


@pytest.mark.parametrize("text", ["90", "0.9", "device%", "9e1%", "-5%"])
def test_other_texts_are_what_they_were(text: str) -> None:
    """A number of bytes, or nothing that is known."""
    assert share_of_device(text) is None


def test_where_no_device_is_asked_the_error_tells_both_apart() -> None:
    """A plan of a graph has no device; nor has a partitioner."""
    assert not is_size("device") and not is_size("90%")
    with pytest.raises(InvalidOptionError, match=r"give bytes, or 0\.9: of the peak without fxremat"):
        resolve_budget("90%", 1000)
    with pytest.raises(InvalidOptionError, match=r"which asks the device\. Give bytes"):
        fxremat.partitioner(budget="device")


def test_a_cpu_is_no_device_to_ask() -> None:
    """Its memory belongs to all that runs there."""
    with pytest.raises(InvalidOptionError, match=r"Give bytes such as '8GiB', or a number such as 0\.4"):
        budget("90%")


# --- What it is --------------------------------------------------------------------------------------------


def test_a_cuda_device_has_free_what_the_driver_and_the_allocator_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the allocator has reserved and does not use is not lost."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    assert capacity.free_bytes(torch.device("cuda", 0)) == 1400
    assert capacity.free_bytes(CPU) is None


def test_what_is_reserved_and_states_to_come_are_left(device: Device) -> None:
    """5 % of all memory is reserved; and whole parts of 1 MiB count."""
    device.states = 20 * MIB
    assert budget("device") == (100 - 13 - 20) * MIB
    assert budget("50%") == (100 - 13 - 20) * MIB // 2


def test_a_device_is_asked_once(device: Device) -> None:
    """What is compiled when the optimizer's states are there has the same budget."""
    first = budget("device")
    device.free = 10 * MIB
    assert budget("device") == first and device.asked == 1


def test_no_room_is_refused(device: Device) -> None:
    """Before anything is planned."""
    device.states = 100 * MIB
    with pytest.raises(InvalidOptionError, match="'device' is nothing: what is held"):
        budget("device")


def test_other_budgets_ask_nothing(device: Device) -> None:
    """They are what they are."""
    options = Options.parse({"budget": "1MiB"})
    assert device_budget.resolved(options, [torch.ones(1)]) is options and device.asked == 0


def test_the_budget_is_reported_in_bytes(device: Device) -> None:
    """A compiled model is planned within it, and gradients stay the same."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))
    batch = torch.randn(512, 32)
    model(batch).sum().backward()
    expected = [each.grad for each in model.parameters()]
    model.zero_grad()
    device.free = 13 * MIB + MIB // 2 + 300 * 1024
    device_budget.GRAINS, grains = MEMORY, device_budget.GRAINS
    try:
        seen = len(fxremat.reports())
        options = {"budget": "50%", "compiler": "eager", "scope": "graph"}
        compiled = torch.compile(lambda x: model(x).sum(), backend="fxremat", options=options)
        compiled(batch).backward()
    finally:
        device_budget.GRAINS = grains
    (report,) = fxremat.reports()[seen:]
    free = device.free - capacity.reserved_bytes(MEMORY)
    assert report.budget_bytes == report.budget == free // 2
    assert report.peak_bytes <= free // 2
    assert all(
        torch.equal(each.grad, other) for each, other in zip(model.parameters(), expected, strict=True)
    )  # type: ignore[arg-type]


# --- The states of optimizers ------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """All objects that there are: a list to fill."""
    alive: list[object] = []
    monkeypatch.setattr(optimizers.gc, "get_objects", lambda: alive)
    return alive


def test_states_to_come_are_those_of_the_optimizers(alone: list[object]) -> None:
    """Those of SGD are none; those of Adam are two, until it has stepped."""
    layer = nn.Linear(32, 32, bias=False)
    size = 32 * 32 * 4
    alone += [layer.weight, torch.optim.SGD(layer.parameters())]
    assert optimizers.states_to_come(CPU, 2) == 0
    adam = torch.optim.Adam(layer.parameters())
    alone += [adam]
    assert optimizers.states_to_come(CPU, 2) == 2 * size
    layer(torch.ones(1, 32)).sum().backward()
    adam.step()
    assert optimizers.states_to_come(CPU, 2) == 0


def test_without_an_optimizer_states_are_assumed(alone: list[object]) -> None:
    """As many as told, of what is trained; a frozen parameter has none. So with one that can't step."""
    layer, frozen = nn.Linear(32, 32, bias=False), nn.Linear(32, 32).requires_grad_(False)
    alone += [layer.weight, *frozen.parameters()]
    assert optimizers.states_to_come(CPU, 2) == 2 * 32 * 32 * 4
    alone += [torch.optim.LBFGS(layer.parameters())]
    assert optimizers.states_to_come(CPU, 3) == 3 * 32 * 32 * 4


# --- Ranks -------------------------------------------------------------------------------------------------


def test_ranks_take_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tells its own and waits for the others."""
    store, found = HashStore(), {}
    groups = {}
    monkeypatch.setattr(processes, "group", lambda: groups[threading.get_ident()])

    def run(rank: int) -> None:
        groups[threading.get_ident()] = Group(rank, 3, store)
        found[rank] = agreement.least("device/0", 100 - rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(timeout=60)
    assert found == {0: 98, 1: 98, 2: 98}


def test_a_rank_that_never_comes_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on; if it comes late with less, it keeps to its own and says so."""
    store = HashStore()
    monkeypatch.setattr(agreement.Round, "patience_seconds", 0.05)
    monkeypatch.setattr(processes, "group", lambda: Group(0, 2, store))
    assert agreement.least("device/0", 100) == 100
    monkeypatch.setattr(processes, "group", lambda: Group(1, 2, store))
    with pytest.warns(UserWarning, match="rank 1 has a budget of its own"):
        assert agreement.least("device/0", 70) == 70


# --- A card that is not there ------------------------------------------------------------------------------


def test_on_a_card_all_that_is_held_is_taken_from_its_memory() -> None:
    """Parameters, batch, and two states of each parameter."""
    example = Example(nn.Linear(32, 32, bias=False), (torch.ones(2, 32),), torch.sum)
    size = 32 * 32 * 4
    left = 1_000_000 - 50_000 - 3 * size - 2 * 32 * 4
    assert card_budget.on_card("device", "a card", 1_000_000, example) == left
    assert card_budget.on_card("50%", "a card", 1_000_000, example) == left // 2
    assert card_budget.on_card("8MiB", "a card", 1_000_000, example) == "8MiB"


def test_the_command_line_has_it(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU it says what to give in its place."""
    source = "import torch\ndef build(): return torch.nn.Linear(4, 4), (torch.ones(2, 4),), torch.sum\n"
    (tmp_path / "net.py").write_text(source, encoding="utf-8")
    assert command.main(["plan", f"{tmp_path}/net.py:build", "--budget", "90%"]) == 2
    assert "'90%' is of what a CUDA device has free" in capsys.readouterr().err
