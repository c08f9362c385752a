"""``fxremat`` on the command line: see what it does to a model before training with it.

    fxremat demo            a short training run, with fxremat and without
    fxremat plan MODEL      what would be kept and recomputed; nothing is compiled, no step is taken
    fxremat plan --step STEP    the same of a training step of several graphs, which share one budget
    fxremat frontier MODEL  what the model can be trained for: peak against time, as a table and a plot
    fxremat fit MODEL       whether a card has room for training it, and for which batch; no GPU is needed
    fxremat explain MODEL   compiles the model, takes one training step, and prints what was done
    fxremat diff FIRST SECOND   what differs between two plans that --save has written
    fxremat calibrate       how fast this machine is, which plans are made by
    fxremat env             which options hold here, and from where; devices, rates and caches
    fxremat paper           a figure of the paper, made again

With ``--device h100`` plan, frontier and explain are for a card that need not be there, and say whether the
step fits it. MODEL names a function that returns a model and what it is called with; see ``example.py``. STEP
names one that returns a function which runs a training step, of models that it has compiled
(``fxremat.survey``).

Exit status: 0, 1 from diff where plans differ, or 2 with one message on stderr where an option, MODEL or the
budget is at fault. Other errors keep their traceback. What is printed is a Report's; nothing is decided here.
Each command imports what it uses, so that a wrong option is told before torch is at work.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxremat.cli.parser import parser, told_unknown
from fxremat.errors import CaptureError, FxrematError, InvalidOptionError

if TYPE_CHECKING:
    from fxremat.device.absent import AbsentCard
    from fxremat.fitting.example import Example
    from fxremat.fitting.fit import Fit
    from fxremat.graph.joint import JointGraph
    from fxremat.measure import Recording
    from fxremat.report.report import Report

_PICTURES = ("html", "snapshot", "trace")  # options that name the file of a picture


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the result is the exit status.

    >>> main(["plan", "nowhere.py:build"])  # says on stderr that there is no such file
    2
    """
    grammar = parser()
    arguments, unknown = grammar.parse_known_args(argv)
    if unknown:
        grammar.error(told_unknown(unknown, arguments))
    if arguments.version:
        print(f"fxremat {importlib.metadata.version('fxremat')}")
        return 0
    if arguments.command is None:
        grammar.print_help()
        return 0
    try:
        status = _COMMANDS[arguments.command](arguments)
    except Exception as error:
        ours = _of_the_family(error)
        if ours is None or arguments.debug:
            raise
        print(f"fxremat: {_message(ours)}", file=sys.stderr)
        return 2
    return status


def _of_the_family(error: BaseException | None) -> FxrematError | None:
    """The error itself, or the one that a compiler wrapped in it."""
    while error is not None and not isinstance(error, FxrematError):
        error = getattr(error, "inner_exception", None) or error.__cause__
    return error


def _message(error: FxrematError) -> str:
    """The message without the advice that Dynamo appends to every error that passes it."""
    return str(error).partition("\n\nSet TORCHDYNAMO_VERBOSE")[0].strip()


def _demo(arguments: argparse.Namespace) -> int:
    from fxremat.cli import demo

    return demo.main(arguments.steps, arguments.device)


def _paper(arguments: argparse.Namespace) -> int:
    from fxremat.paper import command

    return command.main(
        arguments.figure,
        json_path=arguments.json,
        plot_path=arguments.plot,
        quick=arguments.quick,
        full=arguments.full,
        device=arguments.device,
    )


def _plan(arguments: argparse.Namespace) -> int:
    from fxremat.driver.pipeline import planned
    from fxremat.options.options import Options

    if (arguments.model is None) == (arguments.step is None):
        problem = "a plan is of MODEL, such as net.py:build, or of --step STEP: give one of them."
        raise InvalidOptionError("MODEL", problem)
    if arguments.step is not None:
        return _plan_of_step(arguments)
    with _card(arguments) as card, _stages("importing", "capturing", "planning") as next_stage:
        example, graph, options = _captured(arguments, card, next_stage)
        next_stage()
        report = planned(graph, Options.parse(options))
        fit = _fit(example, report.peak_bytes)
    _show([report], {}, fit, arguments)
    _save([report], arguments)
    return 0


def _plan_of_step(arguments: argparse.Namespace) -> int:
    from fxremat.cli.example import step_of
    from fxremat.driver.ahead import survey
    from fxremat.report.step_report import save_step_page

    if arguments.json is not None:
        _check_writable(arguments.json)
    if arguments.save is not None:
        problem = "a step's plans are made for its calls: save those of MODEL, or of fxremat.reports()."
        raise InvalidOptionError("save", problem)
    if arguments.html is not None:
        _check_writable(arguments.html, "html")
    for option in ("snapshot", "trace"):
        if getattr(arguments, option) is not None:
            raise InvalidOptionError(option, "it is of a graph: give MODEL in place of --step.")
    if arguments.budget is not None:
        raise InvalidOptionError("budget", "a step has the budgets that its models are compiled with.")
    if arguments.ignore_checkpoints:
        problem = "a step has the options that its models are compiled with: give it there."
        raise InvalidOptionError("ignore_checkpoints", problem)
    if arguments.device is not None:
        raise InvalidOptionError("device", "a step runs where its models are: give MODEL in place of --step.")
    with _stages("importing", "planning") as next_stage:
        next_stage()
        step = step_of(arguments.step)
        next_stage()
        reports = survey(step)
    if arguments.html is not None:
        save_step_page(arguments.html, reports)
    limit = None if arguments.all else arguments.rows
    print("\n\n".join(f"{report.summary()}\n\n{report.table(limit)}" for report in reports))
    if arguments.json is not None:
        _write_json(arguments.json, {"steps": [json.loads(report.to_json()) for report in reports]})
    return 0


def _frontier(arguments: argparse.Namespace) -> int:
    from fxremat.driver.frontier import make_frontier
    from fxremat.plots.canvas import check_plot
    from fxremat.plots.frontier import plot_frontier, read_points

    if arguments.plot is not None:
        check_plot(arguments.plot)
    measured = [] if arguments.points is None else read_points(arguments.points)
    with _card(arguments) as card, _stages("importing", "capturing", "planning") as next_stage:
        example, graph, options = _captured(arguments, card, next_stage)
        del options["ignore_checkpoints"]  # the graph is captured
        next_stage()
        frontier = make_frontier(graph, **options)
        fits = [_fit(example, point.peak_bytes) for point in frontier.points]
    print(frontier.summary(None if arguments.all else arguments.rows))
    if fits[-1] is not None:
        print(f"\n{_first_that_fits(fits)}")
    if arguments.json is not None:
        _write_json(arguments.json, json.loads(frontier.to_json()))
    if arguments.plot is not None:
        plot_frontier(frontier, arguments.plot, arguments.model, measured)
    return 0


def _fit_of(arguments: argparse.Namespace) -> int:
    from fxremat.cli.fit import fit_of

    if arguments.json is not None:
        _check_writable(arguments.json)
    found = fit_of(arguments)
    print(found)
    if arguments.json is not None:
        _write_json(arguments.json, json.loads(found.to_json()))
    return 0


@contextlib.contextmanager
def _card(arguments: argparse.Namespace) -> Iterator[AbsentCard | None]:
    """The card that was asked for, which need not be there; None for the devices that MODEL names."""
    if arguments.device is None:
        yield None
        return
    from fxremat.device.absent import absent, card_named

    with absent(card_named(arguments.device)) as card:
        yield card


def _captured(
    arguments: argparse.Namespace, card: AbsentCard | None, next_stage: Callable[[], None]
) -> tuple[Example, JointGraph, dict[str, Any]]:
    """MODEL, the joint graph of a training step of it, and the options to plan it with."""
    from fxremat.cli.example import example_of
    from fxremat.driver.capture import capture

    next_stage()
    example = example_of(arguments.model, card)
    options = _on_device(_options(arguments), example)
    next_stage()
    graph = capture(
        example.model,
        *example.positional,
        loss=example.loss,
        compiler=options["compiler"],
        ignore_checkpoints=options["ignore_checkpoints"],
        **example.named,
    )
    if all(gradient is None for gradient in graph.backward_outputs):
        raise CaptureError(f"{graph.name} has no gradient to compute, so there is nothing to plan")
    return example, graph, options


def _explain(arguments: argparse.Namespace) -> int:
    from fxremat.cli.example import example_of

    is_measured = arguments.measure or arguments.device is not None
    is_recorded = arguments.snapshot is not None
    stages = _stages("importing", "compiling", *["measuring"] * is_measured, *["recording"] * is_recorded)
    with _card(arguments) as card, stages as next_stage:
        next_stage()
        example = example_of(arguments.model, card)
        options = _on_device(_options(arguments), example)
        _check_generates_code(options["compiler"], example.device)
        next_stage()
        compiled, reports = _compile(example, options)
        peaks: dict[str, int] = {}
        if is_measured:
            next_stage()
            peaks["eager"] = example.peak_bytes(example.loss_of)
            peaks["fxremat"] = example.peak_bytes(compiled)
        recording = None
        if is_recorded:
            next_stage()
            recording = example.recording(compiled)
        fit = _fit(example, peaks.get("fxremat", 0))
    _show(reports, peaks, fit, arguments)
    _save(reports, arguments, recording)
    return 0


def _compile(example: Example, options: dict[str, Any]) -> tuple[Callable[..., Any], Sequence[Report]]:
    """The compiled loss, one training step old, and the reports of the graphs that the step had."""
    import torch

    from fxremat.driver.backend import fxremat_backend
    from fxremat.driver.journal import reports

    seen = len(reports())
    # What is explained is what is planned now: the source's lines may have moved since a cache was written.
    options = {**options, "fx_graph_cache": False}
    if example.card is not None:
        options["scope"] = "graph"  # nothing of a step on fake tensors can be recorded
    compiled = torch.compile(example.loss_of, backend=fxremat_backend, options=options)
    try:
        example.take_step(compiled)
    except FxrematError:
        raise
    except Exception:
        example.check()  # which raises its own error if the model is at fault
        raise
    if len(reports()) == seen:
        raise CaptureError("no graph with a backward was compiled, so there is nothing to explain")
    return compiled, reports()[seen:]


def _save(
    reports: Sequence[Report], arguments: argparse.Namespace, measured: Recording | None = None
) -> None:
    """Write the plans and the pictures to the files that were asked for."""
    from fxremat.planfile.text import save_plan
    from fxremat.report.page import save_page
    from fxremat.report.snapshot import save_snapshot
    from fxremat.report.trace import save_trace

    if arguments.save is not None:
        save_plan(arguments.save, reports)
    save_both: Callable[..., None] = functools.partial(save_snapshot, measured=measured)
    for option, save in zip(_PICTURES, (save_page, save_both, save_trace), strict=True):
        path = getattr(arguments, option)
        if path is not None:
            save(path, reports)


def _diff(arguments: argparse.Namespace) -> int:
    from fxremat.cli import diff

    return diff.run(arguments)


def _calibrate(arguments: argparse.Namespace) -> int:
    from fxremat.device import calibrate

    print("\n\n".join(calibrate.summaries(arguments.again)))
    return 0


def _env(arguments: argparse.Namespace) -> int:
    from fxremat.cli import env

    print(env.summary())
    return 0


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of the backend, checked."""
    from fxremat.cli.example import load
    from fxremat.options.options import Options, of_text

    names = ("planner", "cost", "compiler", "inplace", "ignore_checkpoints")
    budget = None if arguments.budget is None else of_text("budget", arguments.budget)
    options: dict[str, Any] = {"budget": budget} | {name: getattr(arguments, name) for name in names}
    if ":" in arguments.planner:
        options["planner"] = load("planner", arguments.planner)
    Options.parse(options)
    for option in ("json", "save", *_PICTURES):
        if getattr(arguments, option, None) is not None:
            _check_writable(getattr(arguments, option), option)
    return options


def _on_device(options: dict[str, Any], example: Example) -> dict[str, Any]:
    """The options with bytes in the place of a part of what the device has free."""
    from fxremat.driver import device_budget
    from fxremat.fitting import card_budget
    from fxremat.options.options import Options

    if example.card is None:
        return {**options, "budget": device_budget.resolved(Options.parse(options), example.leaves).budget}
    card = example.card.card
    return {
        **options,
        "budget": card_budget.on_card(options["budget"], card.name, card.memory_bytes, example),
    }


def _check_generates_code(compiler: str, device: str) -> None:
    from fxremat._torch.compilers import missing_compiler

    problem = missing_compiler(device) if compiler == "inductor" else None
    if problem is not None:
        raise InvalidOptionError(
            "compiler", f"Inductor can't generate code: {problem}. Try --compiler eager."
        )


def _fit(example: Example, peak_bytes: int) -> Fit | None:
    """Whether a step of that peak fits the card that is not there; None where there is none."""
    from fxremat.fitting.fit import Fit, Room

    if example.card is None:
        return None
    card = example.card.card
    return Fit(Room.of(card.name, card.memory_bytes, example), peak_bytes)


def _first_that_fits(fits: Sequence[Fit | None]) -> str:
    """Which points of a frontier fit, peaks falling."""
    fitting = [number for number, fit in enumerate(fits, 1) if fit is not None and fit.does_fit]
    first = f"the first point that fits is {fitting[0]}" if fitting else "no point fits"
    return f"{first} of {len(fits)}, held bytes and gradients included"


@contextlib.contextmanager
def _stages(*names: str) -> Iterator[Callable[[], None]]:
    """Say on a terminal which stage is under way; what is yielded begins the next one."""
    from tqdm import tqdm

    waiting = iter(names)
    layout = "{desc}, stage {n} of {total} [{elapsed}]"
    with tqdm(total=len(names), file=sys.stderr, disable=None, leave=False, bar_format=layout) as bar:

        def begin_next() -> None:
            bar.set_description_str(next(waiting), refresh=False)
            bar.update()
            bar.refresh()

        yield begin_next


# --- What is printed ----------------------------------------------------------------------------------


def _show(
    reports: Sequence[Report], peaks: Mapping[str, int], fit: Fit | None, arguments: argparse.Namespace
) -> None:
    """Print the reports, the measured peaks and the fit; write them to the file that was asked for."""
    limit = None if arguments.all else arguments.rows
    print("\n\n".join(f"{report.summary()}\n\n{report.table(limit)}" for report in reports))
    if peaks:
        title = "measured peak" if fit is None else "peak on fake tensors"
        print(f"\n{_peaks_table(reports, peaks, title)}")
    if fit is not None:
        print(f"\n{fit.table()}")
    if arguments.json is None:
        return
    fields = {
        "graphs": [json.loads(report.to_json()) for report in reports],
        "measured_peak_bytes": dict(peaks) if fit is None else {},
        "fit": None if fit is None else json.loads(fit.to_json()),
    }
    _write_json(arguments.json, fields)


def _check_writable(path: Path, option: str = "json") -> None:
    """Raise InvalidOptionError where a file plainly cannot be written, before anything takes time."""
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise InvalidOptionError(option, f"{str(path)!r} can't be written.")


def _write_json(path: Path, fields: object) -> None:
    try:
        path.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidOptionError("json", f"{str(path)!r} can't be written: {error.strerror}.") from error


def _peaks_table(reports: Sequence[Report], peaks: Mapping[str, int], title: str) -> str:
    """Measured beside predicted; a step of several graphs has no predicted peak of its own."""
    from tabulate import tabulate

    from fxremat.report.values import mib

    predicted = {"fxremat": mib(reports[0].peak_bytes)} if len(reports) == 1 else {}
    eager = peaks["eager"]
    rows = [
        (setting, predicted.get(setting, "-"), mib(peak), f"{peak / eager:.1%}" if eager else "-")
        for setting, peak in peaks.items()
    ]
    headers = ("step", "predicted peak", title, "of eager")
    return tabulate(rows, headers, colalign=("left", "right", "right", "right"), disable_numparse=True)


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "demo": _demo,
    "plan": _plan,
    "frontier": _frontier,
    "fit": _fit_of,
    "explain": _explain,
    "diff": _diff,
    "calibrate": _calibrate,
    "env": _env,
    "paper": _paper,
}
