"""Ahead: what is learnt of a training step before it runs, by a rehearsal on fake tensors.

A rehearsal runs the user's function under a mode in which nothing takes memory (``_torch/fakes.py``). Dynamo
traces the function's compiled parts as ever, but each graph is planned only. What is live around the graphs
is counted, and the plans are settled, as after a step that ran (``step.py``).

Dynamo's guards tell fake tensors from real ones. So a graph whose inputs were fake is traced again when the
real step comes; it is known by its text, its inputs and its options (``known``), and goes on as the graph
that was rehearsed. Of several that are alike each is taken once, in the order in which they came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fxremat._torch import fakes
from fxremat._torch.compilers import Origin
from fxremat.driver.options import Options
from fxremat.driver.runner import Runner
from fxremat.driver.step import steps
from fxremat.driver.step_report import StepReport
from fxremat.errors import CaptureError, FxrematError, told

__all__ = ["Later", "keep", "survey", "take"]

_waiting: dict[str, list[Runner]] = {}  # graphs that were rehearsed on fake inputs


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
    with fakes.undisturbed(), fakes.Rehearsal() as rehearsal, steps.rehearsing(rehearsal) as begun:
        try:
            step()
        except FxrematError:
            raise
        except Exception as error:
            raise CaptureError(
                f"the step does not run on fake tensors, which have sizes but no numbers: {told(error)}. Leave "
                f"out of the function what reads numbers, such as item(), numpy() and print, or what is no "
                f"part of forward, loss and backward; or train without a survey: the first step learns the same."
            ) from error
    if not begun:
        raise CaptureError(
            "the step ran no graph that shares a budget: compile its model with backend='fxremat' and a budget"
        )
    return steps.reports(begun.values())


def keep(origin: Origin, options: Options, fingerprint: str, runner: Runner) -> None:
    """Have a graph taken up when it is traced again with real inputs."""
    _waiting.setdefault(_known(origin, options, fingerprint), []).append(runner)


def take(origin: Origin, options: Options, fingerprint: str) -> Runner | None:
    """The rehearsed graph that this is; None if it is none."""
    alike = _waiting.get(_known(origin, options, fingerprint))
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


class Later:
    """A graph that a rehearsal does not plan; compiled when it is first called for real."""

    def __init__(
        self, origin: Origin, compile_: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
    ) -> None:
        self._origin = origin
        self._compile = compile_
        self._compiled: Callable[..., Any] | None = None
        self._module = origin.module()

    def __call__(self, *inputs: Any) -> Any:
        """Run it; in a rehearsal as it is written."""
        if steps.rehearsal is not None:
            return self._module(*inputs)
        if self._compiled is None:
            with steps.paused(), self._origin.resumed():
                self._compiled = self._compile(self._origin.module(), self._origin.inputs)
        return self._compiled(*inputs)
