"""Ahead: what is learnt of a training step before it runs, by a rehearsal on fake tensors.

A rehearsal runs the user's function under a mode in which nothing takes memory (``_torch/fakes.py``). Dynamo
traces the function's compiled parts as ever, but each graph is planned only. What is live around the graphs
is counted, and the plans are settled, as after a step that ran (``step/step.py``).

Dynamo's guards tell fake tensors from real ones. So it forgets what it traced, and traces each graph again
when the real step comes; the graph is known by its text, its inputs and its options, and goes on as the one
that was rehearsed. Of several that are alike each is taken once, in the order in which they came.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from fxremat._torch import fakes
from fxremat._torch.compilers import Origin
from fxremat.driver.runner import Runner
from fxremat.errors import CaptureError, FxrematError, told
from fxremat.options.options import Options
from fxremat.report.step_report import StepReport
from fxremat.step.step import steps

__all__ = ["keep", "survey", "take"]

_waiting: dict[str, list[Runner]] = {}  # graphs that have not run yet, by what they are known by


def survey(step: Callable[[], object]) -> tuple[StepReport, ...]:
    """Learn a training step ahead: the plans of its compiled graphs are settled before it runs.

    The function is run once on fake tensors: nothing takes memory, no kernel runs, and parameters, buffers,
    gradients and random generators stay as they are. The first step that really runs has its plans by then,
    and is recorded, to see whether it takes what was predicted.

    Args:
        step: Runs forward, loss and backward of what was compiled with ``backend="fxremat"`` and a budget.
            Not the optimizer's step.

    Returns:
        A StepReport for each part of it that begins and ends with nothing waiting for its backward.

    Raises:
        CaptureError: The function needs numbers, which fake tensors don't have, or runs no compiled graph.
        InfeasibleBudgetError: No plans fit the budget.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> options = {"budget": "1MiB", "compiler": "eager"}
        >>> layer = torch.compile(nn.Linear(8, 8), backend="fxremat", options=options)
        >>> (report,) = survey(lambda: layer(torch.ones(4, 8)).square().mean().backward())
        >>> report.peak_bytes <= 1 << 20
        True
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(fakes.undisturbed(_refuse_optimizers))
        begun = stack.enter_context(steps.rehearsing(stack.enter_context(fakes.Rehearsal())))
        try:
            step()
        except FxrematError:
            raise
        except Exception as error:
            raise CaptureError(
                f"the step was run on fake tensors, which have sizes but no numbers: {told(error)}. "
                f"Leave out of the function what reads numbers, such as item() and numpy(), and what is no "
                f"part of forward, loss and backward; or do without a survey: the first step learns the same"
            ) from error
    if not begun:
        raise CaptureError(
            "the step ran no graph that shares a budget. Compile a model with backend='fxremat' and a budget"
        )
    for family in begun.values():
        family.settle()
    return steps.reports(begun.values())


def _refuse_optimizers(*_args: object) -> None:
    raise CaptureError(
        "the step's optimizer would keep fake tensors as its state. Leave its step out of the function: "
        "what is learnt is forward, loss and backward"
    )


def keep(origin: Origin, options: Options, fingerprint: str, runner: Runner) -> None:
    """Have a graph taken up when it is traced again with real inputs."""
    _waiting.setdefault(_known(origin, options, fingerprint), []).append(runner)


def take(origin: Origin, options: Options, fingerprint: str) -> Runner | None:
    """The rehearsed graph that this is; None if it is none."""
    alike = _waiting and _waiting.get(_known(origin, options, fingerprint))
    if not alike:
        return None
    runner = alike.pop(0)
    runner.adopt(origin)
    if steps.rehearsal is not None:
        alike.append(runner)
    return runner


def _known(origin: Origin, options: Options, fingerprint: str) -> str:
    """What a graph is known by."""
    return repr((origin.text, options, fingerprint))
