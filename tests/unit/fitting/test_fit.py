"""fit: whether a step has room on a device, and the largest size that has."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import fxremat
from fxremat._torch.optimizers import update_of
from fxremat.errors import CaptureError, InvalidOptionError
from fxremat.fitting.fit import Fit, Room
from fxremat.fitting.fitting import fit, largest_fit

MIB = 1 << 20
KIB = 1 << 10


def of(memory: int, held: int, peak: int, **fields: Any) -> Fit:
    """A step of a peak, beside so much that is held."""
    return Fit(Room("a card", memory, held, 0), peak, **fields)


# --- The sum ----------------------------------------------------------------------------------------------


def test_a_step_that_fits_says_what_is_left() -> None:
    """To the last byte: 5 of 100 MiB are left to libraries."""
    fits = of(100 * MIB, 30 * MIB, 65 * MIB)
    assert fits and fits.left_bytes == 0
    assert "it fits" in fits.table() and "0.00 MiB are left for the optimizer's states" in fits.table()


def test_a_step_that_does_not_fit_says_what_to_do() -> None:
    """And by how much it is too large."""
    fits = of(100 * MIB, 30 * MIB, 67 * MIB)
    assert not fits
    assert "2.00 MiB too much. Ask for a lower budget" in fits.table()


def test_the_larger_of_backward_and_update_counts() -> None:
    """The gradients are live in both; the optimizer's temporaries come when the activations are gone."""
    room = Room("a card", 1000, 300, 50, "Adam", 200, 380)
    assert room.left_bytes == 1000 - 50 - 300 - 50 - 200
    assert Fit(room, 390).left_bytes == 10
    assert Fit(room, 250).left_bytes == 20


def test_a_plan_that_is_too_slow_does_not_fit() -> None:
    """However low its peak."""
    fits = of(1000, 0, 10, slowdown=1.3, most_slowdown=1.2)
    assert not fits and "in no less than 1.30 times the time, and 1.2 is asked for" in fits.table()


# --- The optimizer's step ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "states", "temporaries"),
    [
        (torch.optim.SGD, 0, 0),
        (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), 1, 0),
        (lambda params: torch.optim.AdamW(params, foreach=True), 2, 1),
        (lambda params: torch.optim.AdamW(params, fused=True), 2, 0),
    ],
)
def test_an_update_is_what_a_step_takes(
    make: Callable[[Any], Optimizer], states: int, temporaries: int
) -> None:
    """In parameters: what it keeps, and what is live while it steps. Many at once take a copy of all."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    size = 4 * 64 * 64 * 4
    optimizer = make(model.parameters())
    update = update_of(optimizer)
    assert update.gradient_bytes == size
    assert update.states_bytes == pytest.approx(states * size, abs=64)
    assert update.temporary_bytes == pytest.approx(temporaries * size, abs=64)
    assert not optimizer.state and all(each.grad is None for each in model.parameters())


def test_states_that_are_there_count_once() -> None:
    """An optimizer that has stepped has them; its copy makes none."""
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    before = update_of(optimizer)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    assert update_of(optimizer).states_bytes == pytest.approx(before.states_bytes, abs=4)
    assert optimizer.state[model.weight]["step"] == 1


# --- A model ------------------------------------------------------------------------------------------------


def chain(batch: int = 64) -> tuple[nn.Module, tuple[torch.Tensor, ...], Callable[..., torch.Tensor]]:
    """Layers whose activations grow with the batch."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    return model, (torch.randn(batch, 64),), torch.sum


def fitted(model: Any = chain, *args: Any, **options: Any) -> Fit:
    """A fit on this machine's CPU, without Inductor."""
    return fit(model, *args, **{"device": "cpu", "compiler": "eager", "memory": "1MiB", **options})


def test_a_fit_counts_what_is_held() -> None:
    """Parameters with their biases, the batch, and two states of each."""
    size = 6 * (64 * 64 + 64) * 4
    found = fitted(optimizer="adam")
    assert (found.room.parameters_bytes, found.room.batch_bytes) == (size, 64 * 64 * 4)
    assert found.room.states_bytes == pytest.approx(2 * size, abs=64)
    assert found.room.optimizer == "Adam" and found.room.update_bytes > size


def test_the_peak_is_that_of_the_backend() -> None:
    """The plan that a fit names is the one that its budget gives."""
    found = fitted(memory="400KiB")
    model, args, loss = chain()
    graph = fxremat.capture(model, *args, loss=loss)
    solution = fxremat.plan(graph, budget=found.room.left_bytes, fusion="inplace")
    assert found and solution.peak_bytes == found.peak_bytes
    assert found.baseline_peak_bytes is not None and found.peak_bytes < found.baseline_peak_bytes


def test_the_users_model_stays_as_it_is() -> None:
    """Given as it is, or as a function, it comes to the same."""
    model, args, loss = chain()
    weights = [each.clone() for each in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    found = fitted(model, args, loss=loss, optimizer=optimizer)
    assert found == fitted(optimizer=torch.optim.AdamW)
    assert all(map(torch.equal, weights, model.parameters()))
    assert not optimizer.state and all(type(each) is nn.Parameter for each in model.parameters())


class Named(nn.Module):
    """Takes its batch by name, and returns its loss in an object, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, *, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layer(inputs), labels)}


def test_a_batch_may_be_given_by_name() -> None:
    """Each tensor of it counts once, though it is there under two names."""
    x = torch.ones(4, 8)
    found = fitted(Named(), {"inputs": x, "labels": x}, loss=lambda out: out["loss"])
    assert found and found.room.batch_bytes == 4 * 8 * 4


def test_a_model_takes_no_memory() -> None:
    """4 TiB of parameters are no matter; in half precision they are half of it."""

    def build() -> tuple[nn.Module, tuple[torch.Tensor, ...], Callable[..., torch.Tensor]]:
        model = nn.Sequential(nn.Linear(1 << 20, 1 << 20, bias=False))
        return model.bfloat16(), (torch.ones(1, 1 << 20, dtype=torch.bfloat16),), torch.sum

    found = fitted(build, optimizer="sgd", memory="1GiB")
    assert not found and found.room.parameters_bytes == 1 << 41


def test_weights_may_be_drawn_within_bounds() -> None:
    """torch's function looks for numbers to draw again, of which a model without memory has none."""

    def model() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        layer = nn.Linear(64, 64)
        nn.init.trunc_normal_(layer.weight, std=0.02)
        return layer, (torch.randn(256, 64),)

    assert fitted(model, memory="1GiB").peak_bytes > 0
    weight = nn.init.trunc_normal_(torch.zeros(8, 8))
    assert weight.abs().max() > 0


def test_short_sequences_have_numbers() -> None:
    """Rates that grow with the depth, as models make them: at once, by a part of the layers, by one."""

    def model() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        whole = torch.linspace(0, 0.5, 3).tolist()
        first, second = (part.tolist() for part in (2 * torch.arange(4) + 1).split([3, 1]))
        ones = [each.item() for each in torch.linspace(0, 0.5, 3)]
        assert (whole, first, second, ones) == ([0.0, 0.25, 0.5], [1, 3, 5], [7], whole)
        return nn.Sequential(nn.Linear(64, 64), *map(nn.Dropout, whole)), (torch.randn(256, 64),)

    assert fitted(model, memory="1GiB").peak_bytes > 0
    with pytest.raises(InvalidOptionError, match="may not read any"):
        fitted(lambda: torch.randn(3).tolist(), memory="1GiB")


def test_a_fit_is_written_and_read() -> None:
    """With what follows from its figures."""
    found = fitted(optimizer="adam", largest="batch", memory="600KiB")
    fields = json.loads(found.to_json())
    assert fields["does_fit"] and not fields["beyond"]["does_fit"]
    assert fields["room"]["left_bytes"] == found.room.left_bytes
    assert str(found).startswith("Sequential on this machine's CPU")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adamv"}, "got 'adamv', expected .*'adam'"),
        ({"optimizer": 3}, "got 3, expected None, a name of torch.optim"),
        ({"optimizer": lambda params: None}, "making it gave None, not a torch.optim.Optimizer"),
        (
            {"optimizer": "lbfgs"},
            "the step of LBFGS on fake tensors, which have no numbers, raised TypeError",
        ),
        ({"device": "h1000"}, "Did you mean 'h100'"),
        pytest.param(
            {"device": None},
            "this machine has no GPU: name a card, h200",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        ({"memory": 0.5}, "got 0.5, expected None, a number of bytes, '20GiB'"),
        ({"slowdown": 0.9}, "expected None, a number from 1"),
        ({"largest": "bacth"}, "Did you mean 'batch'"),
        ({"loss": torch.sum}, "are for a module"),
    ],
)
def test_each_mistake_has_its_message(options: dict[str, Any], message: str) -> None:
    """It names the option, and what it takes."""
    with pytest.raises(InvalidOptionError, match=message):
        fitted(**options)


def test_a_module_has_one_size() -> None:
    """What is told is what to give in its place."""
    model, args, loss = chain()
    with pytest.raises(
        InvalidOptionError, match="Give a function in their place that has a parameter 'batch'"
    ):
        fitted(model, args, loss=loss, largest="batch")


def test_what_has_no_gradient_is_refused() -> None:
    """There is nothing to train."""
    model, args, loss = chain()
    with pytest.raises(CaptureError, match="no gradient"):
        fitted(model.requires_grad_(False), args, loss=loss)


# --- The largest size ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("slowdown", [pytest.param(None, marks=pytest.mark.slow), 1.05])
def test_the_largest_batch_fits_and_the_next_one_does_not(slowdown: float | None) -> None:
    """Both by the same prediction as a fit of that batch alone."""
    found = fitted(optimizer="sgd", largest="batch", memory="2MiB", slowdown=slowdown)
    assert found and found.size is not None and found.beyond is not None
    name, batch = found.size
    assert (name, found.beyond.size) == ("batch", ("batch", batch + 1)) and not found.beyond
    for size, does_fit in ((batch, True), (batch + 1, False)):
        alone = fitted(lambda size=size: chain(size), optimizer="sgd", memory="2MiB", slowdown=slowdown)
        assert bool(alone) is does_fit
    assert f"largest batch that fits: {batch}; {batch + 1} " in str(found)
    assert found.looks <= 8


def test_a_faster_step_allows_less() -> None:
    """Than a slower one."""
    sizes = [fitted(largest="batch", memory="2MiB", slowdown=each).size for each in (1.0, 1.2)]
    assert sizes[0] is not None and sizes[1] is not None and sizes[0][1] < sizes[1][1]


@pytest.mark.parametrize("start", [1, 7, 500, 4096])
@pytest.mark.parametrize("needs", [lambda n: 10 * n, lambda n: n * n, lambda n: 10 * n + 40 * (n > 60)])
def test_few_sizes_are_looked_at(start: int, needs: Callable[[int], int]) -> None:
    """Along a line few, and not many where it bends or leaps."""
    looked: list[int] = []

    def at(size: int) -> Fit:
        looked.append(size)
        peak = needs(size)
        return of(2000, 900, peak, least_bytes=peak, size=("n", size))

    found = largest_fit(at, start)
    assert found.size is not None and found.beyond is not None
    assert needs(found.size[1]) <= 1000 < needs(found.size[1] + 1)
    assert found.looks == len(looked) == len(set(looked)) <= 14


def test_a_size_that_is_refused_hides_no_larger_one() -> None:
    """The plan of 65 happens to be too slow, and its next takes more; that of the others is not."""

    def at(size: int) -> Fit:
        peak = 10 * size + 400 * (size in (65, 66))
        return of(2000, 900, peak, least_bytes=peak, size=("n", size))

    found = largest_fit(at, 64)
    assert found.size == ("n", 100) and found.beyond is not None and found.beyond.size == ("n", 101)


def test_where_nothing_fits_the_least_size_says_so() -> None:
    """What is held has no room, whatever the size."""
    found = largest_fit(lambda size: of(100, 200, size, size=("n", size)), 8)
    assert not found and found.beyond is None
    assert "n 1 does not fit" in str(found)


def test_a_size_that_takes_nothing_is_refused() -> None:
    """Else there would be no end."""
    with pytest.raises(InvalidOptionError, match="any size fits"):
        largest_fit(lambda size: of(1000, 200, 10), 8)
