"""paper: the experiments of Chen et al. 2016, at sizes that take seconds."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.cli.command import main
from fxremat.errors import InvalidOptionError
from fxremat.paper import command, figures, strategies
from fxremat.paper.figures import Figure, Point, Sweep, default_sweep, make_figure, slope, stages
from fxremat.paper.networks import LSTM, LSTMSizes, PreActivationResNet, ResNetSizes, stage_blocks
from fxremat.paper.plots import plot_figure
from fxremat.paper.speed import Timing
from fxremat.paper.strategies import Planned
from fxremat.paper.tables import format_figure
from fxremat.plots.canvas import check_plot

RESNET = ResNetSizes(width=4, batch=2, pixels=32, classes=10)
LSTM_SIZES = LSTMSizes(layers=2, hidden=8, batch=3, inputs=5, classes=7)
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)


def planned(strategy: str, size_bytes: int, seconds: float = 1.0) -> Planned:
    """A plan of so many bytes."""
    return Planned(strategy, size_bytes, size_bytes + 10, size_bytes + 10, seconds, 0.1)


def drawn(number: int) -> Figure:
    """A figure of known slopes: 1 without recomputation, 1/2 with the sublinear plan."""
    names = ("resnet", "lstm") if number == 7 else ({5: "resnet", 6: "lstm"}[number],)
    points = tuple(
        Point(
            name,
            size,
            10 * size,
            2**20,
            0.5,
            (
                planned("none", size * 2**30),
                planned("sharing", size * 2**29),
                planned("sublinear", int(math.sqrt(size) * 2**29), 1.25),
                planned("auto", int(math.sqrt(size) * 2**29), 1.2),
                planned("auto at sublinear's peak", int(math.sqrt(size) * 2**29), 1.1),
            ),
        )
        for name in names
        for size in (16, 64, 256)
    )
    timings = tuple(
        Timing(name, 16, strategy, 0.1, ratio, 1.3, 2**20, 2**20)
        for name in names
        for strategy, ratio in {"none": 1.0, "sublinear": 1.25}.items()
        if number == 7
    )
    return Figure(number, points, timings, "a machine", "2026-01-01", "2.13")


# --- Networks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [14, 50, 101, 152, 1001])
def test_resnet_has_the_layers_asked_for(depth: int) -> None:
    """Convolutions outside of shortcuts, and the classifier, are the depth; every stage deepens."""
    with torch.device("meta"):
        network = PreActivationResNet(stage_blocks(depth), RESNET)
    layers = [
        name
        for name, module in network.named_modules()
        if isinstance(module, (nn.Conv2d, nn.Linear)) and "shortcut" not in name
    ]
    assert len(layers) == depth
    assert min(stage_blocks(depth)) >= depth // 20


def test_resnet_of_the_paper_is_the_known_one() -> None:
    """At full width and 50 layers it has the parameters of ResNet-50, but for the last normalisation."""
    with torch.device("meta"):
        network = PreActivationResNet(stage_blocks(50), ResNetSizes())
    assert sum(each.numel() for each in network.parameters()) == 25_549_352


class Reference(nn.Module):
    """The same network by torch.nn.LSTM."""

    def __init__(self, ours: LSTM, sizes: LSTMSizes) -> None:
        super().__init__()
        self.lstm = nn.LSTM(sizes.inputs, sizes.hidden, sizes.layers)
        self.classifier = nn.Linear(sizes.hidden, sizes.classes)
        self.classifier.load_state_dict(ours.classifier.state_dict())
        for layer, cell in enumerate(ours.cells):
            values = {"weight_ih": cell.given.t(), "weight_hh": cell.state.t(), "bias_ih": cell.bias}
            for name, value in values.items():
                getattr(self.lstm, f"{name}_l{layer}").data.copy_(value)
            getattr(self.lstm, f"bias_hh_l{layer}").data.zero_()

    def forward(self, series: Tensor, labels: Tensor) -> Tensor:
        output, _ = self.lstm(series)
        return nn.functional.cross_entropy(self.classifier(output).flatten(0, 1), labels.flatten())


def test_lstm_is_an_lstm() -> None:
    """Loss and gradients are those of torch.nn.LSTM with the same weights."""
    torch.manual_seed(0)
    ours = LSTM(LSTM_SIZES)
    theirs = Reference(ours, LSTM_SIZES)
    batch = torch.randn(6, 3, 5), torch.randint(7, (6, 3))
    losses = [network(*batch) for network in (ours, theirs)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for layer, cell in enumerate(ours.cells):
        torch.testing.assert_close(cell.given.grad, getattr(theirs.lstm, f"weight_ih_l{layer}").grad.t())
        torch.testing.assert_close(cell.state.grad, getattr(theirs.lstm, f"weight_hh_l{layer}").grad.t())
        torch.testing.assert_close(cell.bias.grad, getattr(theirs.lstm, f"bias_ih_l{layer}").grad)


# --- Strategies ---------------------------------------------------------------------------------------


def lstm_graph(steps: int = 4) -> fxremat.JointGraph:
    """A small unrolled LSTM."""
    torch.manual_seed(0)
    inputs = torch.randn(steps, 3, 5), torch.zeros(steps, 3, dtype=torch.long)
    return fxremat.capture(LSTM(LSTM_SIZES), *inputs)


def test_parameter_gradients_are_the_outputs() -> None:
    """Without anything in place they are one storage per parameter, as large as it."""
    graph = lstm_graph()
    sizes = [graph.storage_bytes[each] for each in strategies.parameter_gradients(graph, in_place=False)]
    assert sorted(sizes) == sorted(each.nbytes for each in LSTM(LSTM_SIZES).parameters())


def test_partial_sums_are_parameter_gradients() -> None:
    """In place, a weight that T steps use has T partial sums, its first contribution among them."""
    graph = lstm_graph(steps=4)
    sizes = [graph.storage_bytes[each] for each in strategies.parameter_gradients(graph, in_place=True)]
    given, state, classifier = (4 * 5 * 32, 4 * 8 * 32, 4 * 8 * 7)
    assert (sizes.count(given), sizes.count(classifier)) == (4, 4)
    assert sizes.count(state) == 3 * 4  # two layers' states and the second layer's input


def test_a_shared_gradient_is_no_partial_sum() -> None:
    """Of two contributions to a gradient, one that is another parameter's gradient is not added to."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))
            self.other = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            both = self.weight + self.other  # one gradient for both
            return ((x @ both) @ self.weight).sum()

    graph = fxremat.capture(Twice(), torch.randn(4, 4))
    found = strategies.parameter_gradients(graph, in_place=True)
    outputs = strategies.parameter_gradients(graph, in_place=False)
    (alone,) = set(found) - set(outputs)
    (maker,) = [node.name for node in graph.nodes if alone in node.creates]
    assert graph.operator(maker) == "aten.mm.default"


def test_strategies_stand_in_the_papers_order() -> None:
    """Networks without convolutions go without drop bn-relu; what is missing is left out."""
    names = [each.name for each in strategies.strategies_for(convolutional=True)]
    assert names == [name for name in strategies.NAMES if name in names]
    assert {"none", "sharing", "drop bn-relu", "sublinear", "auto"} <= set(names)
    assert "drop bn-relu" not in {each.name for each in strategies.strategies_for(convolutional=False)}


@pytest.mark.slow
def test_each_strategy_takes_less_than_the_one_before() -> None:
    """none > in place > sharing > sublinear >= auto in bytes; recomputation takes time."""
    graph = lstm_graph(steps=6)
    found = strategies.plan_strategies(graph, strategies.strategies_for(convolutional=False))
    by_name = {each.strategy: each for each in found}
    falling = [name for name in ("none", "in-place", "sharing", "sublinear", "auto") if name in by_name]
    sizes = [by_name[name].total_bytes for name in falling]
    assert sizes == sorted(sizes, reverse=True)
    assert by_name["none"].seconds < by_name["auto at sublinear's peak"].seconds
    assert by_name["auto at sublinear's peak"].seconds <= by_name["sublinear"].seconds
    assert all(each.feature_map_bytes < each.total_bytes for each in found)


# --- Figures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [0.0, 0.3, 0.5, 1.0])
def test_slope_is_the_exponent(exponent: float) -> None:
    """Of a power law it is found exactly, whatever the factor."""
    sizes = [50, 100, 400, 1000]
    assert slope(sizes, [7 * size**exponent for size in sizes]) == pytest.approx(exponent)


def test_slope_of_one_size_is_not_known() -> None:
    """A point has no slope."""
    assert math.isnan(slope([50], [1]))


def test_a_figure_is_planned_point_by_point() -> None:
    """Each size is planned by every strategy, and progress is told as often as was said."""
    sweep = Sweep({"resnet": (14, 26)}, {}, resnet=RESNET)
    told: list[str] = []
    figure = make_figure(5, sweep, told.append)
    assert len(told) == stages(sweep)
    assert [point.size for point in figure.points] == [14, 26]
    names = [each.name for each in strategies.strategies_for(convolutional=True)]
    assert all([each.strategy for each in point.planned] == names for point in figure.points)


def test_full_size_takes_no_memory() -> None:
    """The paper's widths are planned with fake tensors: its feature maps alone are gigabytes."""
    point = figures.plan_point("resnet", 14, default_sweep(5))
    none, sharing = point.of("none"), point.of("sharing")
    assert none is not None and sharing is not None
    assert none.feature_map_bytes > 2 * sharing.feature_map_bytes > 2**30


def test_times_are_measured_side_by_side() -> None:
    """Each strategy is run; the first is the one that the others are compared with."""
    lstm = replace(LSTM_SIZES, layers=1)
    sweep = Sweep({}, {"lstm": (3,)}, timed_lstm=lstm, rounds=2)
    first, *others = make_figure(7, sweep).timings
    assert (first.strategy, first.ratio, first.predicted_ratio) == ("none", 1.0, 1.0)
    assert {"sublinear", "auto"} <= {each.strategy for each in others}
    assert all(each.peak_bytes == each.predicted_peak_bytes for each in (first, *others))


@pytest.mark.parametrize("number", [5, 6, 7])
def test_json_reads_back(number: int) -> None:
    """What is written is what was there."""
    assert Figure.from_json(drawn(number).to_json()) == drawn(number)


@pytest.mark.parametrize(
    ("number", "quick", "full"), [(5, False, False), (5, True, False), (6, False, True), (7, False, False)]
)
def test_default_sizes(number: int, quick: bool, full: bool) -> None:
    """Each figure has its networks; the paper's depths reach 1000 layers and 1024 steps."""
    sweep = default_sweep(number, quick=quick, full=full)
    networks = {5: {"resnet"}, 6: {"lstm"}, 7: {"resnet", "lstm"}}[number]
    assert set(sweep.planned) == networks
    assert set(sweep.timed) == (networks if number == 7 else set())
    assert number != 6 or sweep.planned["lstm"][-1] == 1024
    assert number != 5 or quick or sweep.planned["resnet"][-1] > 1000


# --- What is printed and drawn ------------------------------------------------------------------------


def test_table_of_memory() -> None:
    """A row per size, a column per strategy, slopes below, and the paper's totals beside ours."""
    text = format_figure(drawn(5))
    lines = text.splitlines()
    assert lines[1].split() == ["layers", "nodes", "none", "sharing", "sublinear", "auto"]
    assert lines[3].split() == ["16", "160", "16.000", "8.000", "2.000", "2.000"]
    assert lines[6].split() == ["slope", "1.00", "1.00", "0.50", "0.50"]
    (paper,) = [line for line in lines if line.startswith("paper, 1000")]
    assert "48 GB" in paper and "7 GB" in paper
    ratios = text.split("\n\n")[2].splitlines()
    assert ratios[3].split() == ["16", "2.0x", "4.0x", "4.0x"]


def test_table_of_times() -> None:
    """Predicted and measured extra time, in percent."""
    predicted, measured = format_figure(drawn(7)).split("\n\n")
    assert predicted.splitlines()[3].split() == ["resnet", "16", "+25.0%", "+10.0%", "+20.0%"]
    assert measured.splitlines()[4].split()[3:6] == ["100.0", "+25.0%", "+30.0%"]


@needs_matplotlib
@pytest.mark.parametrize("number", [5, 6, 7])
def test_plots_are_written(number: int, tmp_path: Path) -> None:
    """A PNG and an SVG, the same each time."""
    png, svg = plot_figure(drawn(number), tmp_path / "figure.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text("utf-8")
    plot_figure(drawn(number), png)
    assert "<svg" in text and text == svg.read_text("utf-8")


def test_plots_need_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, the error says what to install."""
    monkeypatch.setattr("fxremat.plots.canvas.find_spec", lambda name: None)
    with pytest.raises(InvalidOptionError, match=r"pip install 'fxremat\[plot\]'"):
        check_plot(tmp_path / "figure.png")


@needs_matplotlib
@pytest.mark.parametrize("name", ["figure.pdf", "nowhere/figure.png"])
def test_plots_have_a_place(name: str, tmp_path: Path) -> None:
    """A name that can't be written is refused before anything is planned."""
    with pytest.raises(InvalidOptionError):
        check_plot(tmp_path / name)


# --- The command --------------------------------------------------------------------------------------


def test_command_prints_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``fxremat paper`` prints the tables and writes JSON that says how it was made."""
    path = tmp_path / "figure.json"
    monkeypatch.setattr(
        command, "default_sweep", lambda *args, **kwargs: Sweep({"lstm": (2, 3)}, {}, lstm=LSTM_SIZES)
    )
    assert main(["paper", "--figure", "6", "--quick", "--json", str(path)]) == 0
    figure = Figure.from_json(path.read_text("utf-8"))
    assert capsys.readouterr().out.strip() == format_figure(figure)
    fields = json.loads(path.read_text("utf-8"))
    assert fields["command"] == "fxremat paper --figure 6 --quick"
    assert fields["wall_seconds"] > 0 and (fields["host_peak_bytes"] or 2**28) > 2**27


@pytest.mark.parametrize("option", [["--json", "nowhere/figure.json"], ["--plot", "figure.pdf"]])
def test_command_fails_before_it_works(
    option: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that can't be written is one message and status 2, at once."""
    monkeypatch.setattr(command, "make_figure", lambda *args: pytest.fail("it was planned"))
    assert main(["paper", "--figure", "5", *option]) == 2
    assert capsys.readouterr().err.startswith(f"fxremat: option '{option[0][2:]}'")


@pytest.mark.parametrize("arguments", [[], ["--figure", "4"], ["--figure", "5", "--quick", "--full"]])
def test_command_refuses_other_options(arguments: list[str]) -> None:
    """There are three figures, and one size at a time."""
    with pytest.raises(SystemExit):
        main(["paper", *arguments])
