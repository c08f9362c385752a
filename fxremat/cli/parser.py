"""The grammar of the command line: its commands, what each takes, and what they say of it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxremat.errors import near_matches

_ROWS = 20  # of a report's table, unless told otherwise


def parser() -> argparse.ArgumentParser:
    """The command line; what is parsed has the command's name as ``command``, None where there is none."""
    found = argparse.ArgumentParser(
        "fxremat", description="Train the same model in a fraction of the memory."
    )
    found.add_argument("--version", action="store_true", help="print the version and exit")
    found.set_defaults(command=None)
    commands = found.add_subparsers(title="commands", metavar="COMMAND")
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument("--debug", action="store_true", help="show the traceback of every error")
    asked = argparse.ArgumentParser(add_help=False, parents=[debug])
    _add_model_options(asked)

    demo = commands.add_parser("demo", parents=[debug], help="train a small model with fxremat and without")
    demo.add_argument("--steps", type=int, default=20, help="training steps per setting (default: 20)")
    demo.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    demo.set_defaults(command="demo")

    plan = commands.add_parser("plan", parents=[debug], help="print a model's plan, compiling nothing")
    plan.add_argument(
        "--step",
        metavar="STEP",
        help="in place of MODEL: package.module:function or path/to/file.py:function; the function takes no "
        "arguments, compiles its models with backend='fxremat' and a budget, and returns a function that "
        "runs forward, loss and backward",
    )
    _add_model_options(plan, is_model_needed=False)
    _add_files(plan)
    plan.set_defaults(command="plan")

    frontier = commands.add_parser(
        "frontier", parents=[asked], help="print all peaks and times to choose from, compiling nothing"
    )
    frontier.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw it, as PNG and as SVG")
    frontier.add_argument(
        "--points",
        type=Path,
        metavar="FILE.json",
        help="measured points to draw upon it (see bench/frontier.md)",
    )
    frontier.set_defaults(command="frontier")

    explain = commands.add_parser(
        "explain", parents=[asked], help="compile a model, take a training step, print what was done"
    )
    explain.add_argument("--measure", action="store_true", help="also measure the peak, and that of eager")
    _add_files(explain)
    explain.set_defaults(command="explain")

    calibrate = commands.add_parser(
        "calibrate", parents=[debug], help="print this machine's rates, which are measured once and kept"
    )
    calibrate.add_argument("--again", action="store_true", help="forget all that was measured, and measure")
    calibrate.set_defaults(command="calibrate")
    _add_env(commands, debug)
    _add_paper(commands, debug)
    _add_diff(commands, debug)
    _add_fit(commands, debug)
    return found


def told_unknown(words: Sequence[str], parsed: argparse.Namespace) -> str:
    """What to say of words that the grammar has no place for, beside what it has parsed."""
    known = [f"--{name.replace('_', '-')}" for name in vars(parsed)]
    near = [each for word in words for each in near_matches(word.partition("=")[0], known)]
    advice = f" Did you mean {' or '.join(near)}?" if near else ""
    budget = getattr(parsed, "budget", None)
    if budget is not None and budget.isdecimal() and words[0].isalpha():
        advice = f" A size is one word: {budget}{words[0]}."
    return f"unknown: {' '.join(words)}.{advice}"


def _add_files(parser: argparse.ArgumentParser) -> None:
    """What is written beside what is printed."""
    parser.add_argument(
        "--save", type=Path, metavar="PLAN.json", help="also write the plan to a file, for option plan"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE.html", help="also write a page with pictures, for any browser"
    )
    parser.add_argument(
        "--snapshot",
        type=Path,
        metavar="FILE.pickle",
        help="also write the predicted timeline as a memory snapshot, for pytorch.org/memory_viz; "
        "explain records a step for it as well",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.json",
        help="also write the predicted timeline as a trace, for ui.perfetto.dev",
    )


def _add_diff(commands: Any, debug: argparse.ArgumentParser) -> None:
    diff = commands.add_parser(
        "diff", parents=[debug], help="what differs between two saved plans: status 0 for nothing, 1, or 2"
    )
    diff.add_argument("first", type=Path, metavar="FIRST.json")
    diff.add_argument("second", type=Path, metavar="SECOND.json")
    diff.set_defaults(command="diff")


def _add_env(commands: Any, debug: argparse.ArgumentParser) -> None:
    env = commands.add_parser(
        "env", parents=[debug], help="print which options hold here and from where, devices, rates and caches"
    )
    env.set_defaults(command="env")


def _add_fit(commands: Any, debug: argparse.ArgumentParser) -> None:
    fit = commands.add_parser(
        "fit", parents=[debug], help="say whether a card has room for training a model; no GPU is needed"
    )
    fit.add_argument(
        "model",
        metavar="MODEL",
        help="package.module:function or path/to/file.py:function; the function returns (model, args) or "
        "(model, args, loss), and may have parameters with defaults, such as batch=8",
    )
    fit.add_argument(
        "--device", metavar="CARD", help="a card such as h100, which need not be there; cuda (default) or cpu"
    )
    fit.add_argument("--memory", help="20GiB or a number of bytes, in place of all that the card has")
    fit.add_argument(
        "--optimizer",
        help="adamw or another name of torch.optim, or MODULE:FUNCTION of yours that makes it of the "
        "parameters (default: no optimizer's states are counted)",
    )
    fit.add_argument(
        "--slowdown",
        type=float,
        help="how many times the time without fxremat a step may take, such as 1.2 (default: any)",
    )
    fit.add_argument(
        "--largest",
        metavar="PARAMETER",
        help="a parameter of MODEL's function, such as batch: look for its largest value that fits",
    )
    fit.add_argument("--planner", default="auto", help="a planner's name, or MODULE:FUNCTION of your own")
    fit.add_argument("--compiler", choices=("inductor", "eager"), default="inductor")
    fit.add_argument("--json", type=Path, metavar="FILE", help="also write everything to FILE as JSON")
    fit.set_defaults(command="fit")


def _add_paper(commands: Any, debug: argparse.ArgumentParser) -> None:
    paper = commands.add_parser("paper", parents=[debug], help="make a figure of Chen et al. 2016 again")
    figures = "5: ResNet, memory against layers; 6: LSTM, memory against steps; 7: extra time of both"
    paper.add_argument("--figure", type=int, choices=(5, 6, 7), required=True, help=figures)
    paper.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE as JSON")
    paper.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw it, as FILE.png and FILE.svg")
    size = paper.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="small networks, done in seconds")
    size.add_argument(
        "--full", action="store_true", help="up to 1024 steps of the LSTM, for some minutes more"
    )
    paper.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="where figure 7 is measured (default: cuda where there is one)",
    )
    paper.set_defaults(command="paper")


def _add_model_options(parser: argparse.ArgumentParser, is_model_needed: bool = True) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs=None if is_model_needed else "?",
        help="package.module:function or path/to/file.py:function; the function takes no arguments and "
        "returns (model, args) or (model, args, loss)",
    )
    parser.add_argument(
        "--budget",
        help="8GiB, a number of bytes, a fraction of the peak without fxremat such as 0.4, min, device for "
        "what the device has free, or a part of that such as 90%% "
        "(default: no more memory and time than without fxremat)",
    )
    parser.add_argument("--planner", default="auto", help="a planner's name, or MODULE:FUNCTION of your own")
    parser.add_argument("--cost", choices=("roofline", "measured"), default="roofline")
    parser.add_argument("--compiler", choices=("inductor", "eager"), default="inductor")
    parser.add_argument(
        "--no-inplace",
        dest="inplace",
        action="store_false",
        help="with --compiler eager: no result is written over an operand, as planner exact needs it",
    )
    parser.add_argument(
        "--ignore-checkpoints",
        action="store_true",
        help="plan as if the model did not call torch.utils.checkpoint, its policies included",
    )
    parser.add_argument(
        "--device",
        metavar="CARD",
        help="plan for a card that is not there, such as h100 or a100-40gb: the model runs on fake tensors, "
        "which take no memory",
    )
    parser.add_argument("--rows", type=_rows, default=_ROWS, help=f"rows of the table (default: {_ROWS})")
    parser.add_argument("--all", action="store_true", help="all rows of the table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to FILE as JSON")


def _rows(text: str) -> int:
    """How many rows of a table are wanted."""
    if not text.isdecimal() or len(text) > 9 or int(text) == 0:
        raise argparse.ArgumentTypeError(
            f"got {text[:80]!r}, expected a number from 1; --all prints all rows"
        )
    return int(text)
