"""bench/frontier: its wrapping changes no result, its race times nothing wrong, its verdicts are fair."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import frontier as command
import models
import pytest
import torch
from racing import compare, peers, wrapping
from racing import race as racing
from racing.compare import AGAIN, OURS, Candidate
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxremat.plots.frontier import read_points

# --- Wrapping -----------------------------------------------------------------------------------------


class Counts(TorchDispatchMode):
    """Counts what runs: products and convolutions, and operators in all."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.operators = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += operator in wrapping._SAVED
        self.operators += 1
        return operator(*args, **(kwargs or {}))


def step(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor], Counts]:
    """Loss, gradients, and what ran."""
    with Counts() as counts:
        loss, gradients = models.train_step(module, inputs)
    return loss, gradients, counts


@pytest.mark.parametrize("name", wrapping.MODELS)
def test_wrapping_recomputes_and_changes_nothing_else(name: str) -> None:
    """Bit for bit; operators run again, but under selective checkpoint no product does."""
    plain, inputs = models.fresh(models.case(name))
    loss, gradients, once = step(plain, inputs)
    ways = wrapping.ways(name, plain, inputs, wrapping.checkpointed())
    assert len(ways) >= 2
    for way in ways:
        for run in (wrapping.checkpointed(), wrapping.saves_products()):
            wrapped, inputs = models.fresh(models.case(name))
            wrapping.ways(name, wrapped, inputs, run)[way]()
            found_loss, found, again = step(wrapped, inputs)
            assert torch.equal(found_loss, loss) and found.keys() == gradients.keys()
            assert all(torch.equal(found[key], gradient) for key, gradient in gradients.items())
            assert again.operators > once.operators
            assert again.products == once.products or "context_fn" not in run.keywords


def test_segments_have_one_two_three_and_root_of_n_blocks() -> None:
    """Each length once, none longer than the network."""
    assert wrapping.segment_lengths(32) == [1, 2, 3, 6]
    assert wrapping.segment_lengths(12) == [1, 2, 3, 4]
    assert wrapping.segment_lengths(6) == [1, 2, 3]
    assert wrapping.segment_lengths(2) == [1, 2]


def test_peers_begin_with_the_unit() -> None:
    """All families by default; without generated code only those of eager are left."""
    both = peers.peers(["every 1", "every 2"], peers.FAMILIES, (True, False))
    assert [each.name for each in both[:3]] == ["inductor", "eager", "activation_memory_budget 0.7"]
    assert Counter(each.is_compiled for each in both) == {True: 9, False: 4}
    assert all(each.name.startswith(each.family) for each in both)
    eager = peers.peers(["every 1"], ("checkpoint", "budget"), (False,))
    assert [each.name for each in eager] == ["eager", "checkpoint, eager, every 1"]


# --- Verdicts -----------------------------------------------------------------------------------------


def test_the_interval_is_that_of_order_statistics() -> None:
    """Of 15 ratios the 4th to the 12th, which hold the median with 96.5 %; of five, all."""
    assert compare.interval([float(n) for n in range(15, 0, -1)]) == (4.0, 8.0, 12.0)
    assert compare.interval([3.0, 1.0, 2.0, 5.0, 4.0]) == (1.0, 3.0, 5.0)


def timed(name: str, family: str, peak_bytes: int, seconds: float, *rank: float) -> Candidate:
    """A candidate whose times scatter by 2 % around the given one."""
    times = tuple(seconds * (1 + 0.01 * ((n % 5) - 2)) for n in range(15))
    return Candidate(name, family, "", peak_bytes, times, rank)


UNIT = timed("inductor", "inductor", 1000, 1.0)


@pytest.mark.parametrize(("seconds", "verdict"), [(0.9, "faster"), (1.1, "slower"), (1.0, "equal")])
def test_verdicts(seconds: float, verdict: str) -> None:
    """What fxremat takes at the peer's peak, against the peer."""
    peer, ours = timed("eager", "eager", 500, 1.0), timed("ours", OURS, 500, seconds, 0.0)
    (_, row) = compare.rows([UNIT, peer, ours])
    assert (row.verdict, row.ours, row.ours_peak_bytes) == (verdict, "ours", 500)
    assert row.against_peer[1] == pytest.approx(seconds)


def test_what_is_within_the_noise_is_equal() -> None:
    """The unit's second timing is 5 % off, so 4 % say nothing and 10 % do."""
    again = timed("inductor, again", AGAIN, 1000, 1.05)
    for seconds, verdict in ((0.96, "equal"), (0.9, "faster")):
        (row,) = compare.rows([UNIT, again, timed("ours", OURS, 900, seconds, 0.0)])
        assert row.verdict == verdict


def test_the_predicted_fastest_counts_not_the_luckiest() -> None:
    """Of those that fit the peer's peak."""
    ours = [
        timed("above", OURS, 600, 0.5, 0.1),
        timed("predicted", OURS, 500, 1.0, 0.2),
        timed("lucky", OURS, 400, 0.8, 0.3),
    ]
    (_, row) = compare.rows([UNIT, timed("eager", "eager", 500, 1.2), *ours])
    assert row.ours == "predicted"


def test_a_row_without_a_plan_or_without_a_peer() -> None:
    """Where fxremat has no such peak, and where the peer is wrong, there is no ratio."""
    low = timed("checkpoint", "checkpoint", 10, 1.2)
    wrong = Candidate("selective", "selective", "wrong: loss (1 of 5)", 100)
    found = compare.rows([UNIT, low, wrong, timed("ours", OURS, 500, 1.0, 0.0)])
    assert [row.verdict for row in found] == ["equal", "not reached", "wrong: loss (1 of 5)"]
    counts = compare.summary(found)
    assert (counts["equal"], counts["not reached"], counts["no peer"]) == (1, 1, 1)
    assert counts["mean_time_against_peers"] == pytest.approx(1.0)
    assert "wrong: loss" in compare.format_rows(found)
    assert compare.format_summary({"net": found}).splitlines()[2].split()[:6] == ["net", *"01011"]


# --- The race -----------------------------------------------------------------------------------------


class Asked(racing.Seeker):
    """Has no program: what a budget gives is measured at so much of it."""

    def __init__(self, excess: float, refused_below: int = 0) -> None:
        super().__init__(cast(racing.Race, None), "eager")
        self.excess, self.refused_below = excess, refused_below
        self.budgets: list[float | str | None] = []

    def compile(self, budget: float | str | None, name: str) -> racing.Runner | None:
        """A runner with a peak and without a program; None below what is refused."""
        self.budgets.append(budget)
        size = {None: 2000, "min": 500}.get(cast(str, budget), budget)
        assert isinstance(size, int)
        if size < self.refused_below:
            return None
        found = Candidate(name, OURS, peak_bytes=int(size * self.excess))
        return racing.Runner(found, cast(racing.Program, None))


def test_fxremat_is_given_the_peaks_as_budgets() -> None:
    """In bytes; lower where more was measured, a few times; nothing more where it is refused."""
    exact = Asked(1.0)
    assert exact.fit(1050) and exact.budgets == [1050]
    above = Asked(1.1)
    assert above.fit(1000) and above.budgets == [1000, 909]
    far = Asked(1.1)
    far.compile = lambda budget, name: Asked.compile(far, 3000, name)  # type: ignore[method-assign]
    assert not far.fit(1000) and len(far.budgets) == racing._TRIES
    refused = Asked(1.0, refused_below=600)
    assert not refused.fit(599) and refused.budgets == [599]


def test_what_a_larger_budget_gave_serves_where_it_fits() -> None:
    """No budget above all; the least plan is no plan for a budget."""
    seeker = Asked(0.5)
    seeker.default()
    seeker.least()
    assert seeker.fit(1000) and seeker.budgets == [None, "min"]
    assert seeker.fit(900) and seeker.budgets[2:] == [900]
    assert seeker.fit(450) and seeker.budgets[3:] == []
    assert seeker.fit(300) and seeker.budgets[3:] == [300]


def test_look_alike_modules_are_compiled_each() -> None:
    """Dynamo serves none with what it compiled for the other, though its guards would let it."""
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        seen.append(graph)
        return graph.forward

    for _ in range(2):
        module = nn.Linear(2, 2)
        torch.compile(racing.loss_of(module), backend=backend)(torch.ones(1, 2))
    assert len(seen) == 2


@pytest.fixture(scope="module")
def race() -> racing.Race:
    """A race whose candidates need no generated code."""
    return racing.Race("transformer", "small", compiler="eager")


def test_a_candidate_that_is_wrong_is_not_timed(race: racing.Race) -> None:
    """Neither one that computes something else nor one that raises an error."""
    assert race._add("twice", "checkpoint", lambda module: lambda *inputs: 2 * module(*inputs)) is None
    assert race._add("broken", "checkpoint", lambda module: {}["way"]) is None
    assert [each.name for each in race.failed] == ["twice", "broken"]
    assert race.failed[0].problem.startswith("wrong: loss (")
    assert race.failed[1].problem == "KeyError: 'way'"
    assert race.runners == []


@pytest.mark.slow
def test_fxremat_is_measured_at_each_peak() -> None:
    """Each peer has a row in which fxremat fits; no budget is asked for twice."""
    race = racing.Race("llama", "small", compiler="eager")
    candidates = race.run(("eager", "checkpoint"), rounds=2)
    assert candidates[0].name == "eager"
    assert {each.problem for each in candidates} == {""}
    assert {len(each.seconds) for each in candidates} == {2}
    assert len({each.name for each in candidates}) == len(candidates)
    rows = compare.rows(candidates)
    assert [row.peer for row in rows[:2]] == ["eager", "checkpoint, eager, every 1"]
    assert all(0 < row.ours_peak_bytes <= row.peak_bytes for row in rows)
    ours = [each for each in candidates if each.family == OURS]
    assert all(each.peak_bytes == each.details["predicted_peak_bytes"] for each in ours if each.details)
    assert min(ours, key=lambda each: each.peak_bytes).name.endswith("min")


def test_the_command_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON, and points that ``fxremat frontier`` reads; a second run measures nothing."""
    path = tmp_path / "out.json"
    options = "--models tanh_mlp --peers eager --rounds 1 --compiler eager --json"
    monkeypatch.setattr(sys, "argv", ["run.py", *options.split(), str(path)])
    assert command.main() == 0
    kept = path.read_text()
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("it was measured again"))
    assert command.main() == 0
    assert path.read_text() == kept
    fields = json.loads(kept)
    assert fields["torch"] == torch.__version__ and fields["command"].endswith(str(path))
    (row,) = fields["models"]["tanh_mlp"]["rows"]
    assert row["peer"] == "eager" and row["verdict"] in compare.VERDICTS
    assert fields["summary"] == fields["models"]["tanh_mlp"]["summary"]
    points = read_points(tmp_path / "out" / "tanh_mlp-points.json")
    assert points[0].name == "eager" and points[0].time_ratio == 1
    assert {point.family for point in points} == {"eager", OURS}


def test_a_model_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are still there, and the status is 1."""
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: None)
    monkeypatch.setattr(sys, "argv", ["run.py", "--models", "resnet", "--json", str(tmp_path / "out.json")])
    assert command.main() == 1
    assert capsys.readouterr().err == "resnet: failed\n"


@pytest.mark.slow
@pytest.mark.inductor
def test_a_race_through_inductor() -> None:
    """All families of peers train right, and fxremat stands where each does."""
    race = racing.Race("gated_mlp", "small")
    candidates = race.run(peers.FAMILIES, rounds=1)
    assert candidates[0].name == "inductor"
    assert [each for each in candidates if each.problem] == []
    assert all(row.ours_peak_bytes <= row.peak_bytes for row in compare.rows(candidates))
