"""Env: what holds in this process before anything is compiled, for a person. Nothing is measured."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable

import torch
from tabulate import tabulate

from fxremat._torch import compilers, versions
from fxremat.device import ledger, rates
from fxremat.options.settings import VARIABLES, settings
from fxremat.step import stored


def summary() -> str:
    """The options that hold, each with its value and its place; then versions, devices and caches.

    Raises:
        InvalidOptionError: A variable of the environment is misspelt, or has an unknown value.
        RatesError: Rates are pinned, but can't be taken at their word.
    """
    variables = {option: variable for variable, option in VARIABLES.items()}
    held = [(each.name, each.value, each.source, variables.get(each.name, "")) for each in settings()]
    options = tabulate(held, ("option", "value", "from", "variable"), disable_numparse=True)
    return f"{options}\n\n{tabulate(_machine(), tablefmt='plain', disable_numparse=True)}"


def _machine() -> Iterable[tuple[str, str]]:
    yield "fxremat", importlib.metadata.version("fxremat")
    yield "Python", platform.python_version()
    yield "torch", f"{torch.__version__}, {_support()}"
    for device in _devices():
        yield f"device {device}", _described(device)
        yield f"rates of {device}", rates.source(device)
    yield "rates are kept in", str(ledger.folder())
    cache, steps = compilers.cache_folder(), stored.folder()
    yield "code is cached in", "nowhere" if cache is None else str(cache)
    yield "steps are stored in", "nowhere" if steps is None else str(steps)


def _support() -> str:
    if versions.is_supported(torch.__version__):
        return "supported"
    return f"not supported: fxremat is made for {versions.supported()}"


def _devices() -> Iterable[torch.device]:
    yield torch.device("cpu")
    for index in range(torch.cuda.device_count()):
        yield torch.device("cuda", index)


def _described(device: torch.device) -> str:
    facts = rates.facts(device)
    lacks = compilers.missing_compiler(str(device))
    return f"{facts['device']}" + ("" if lacks is None else f"; Inductor can't generate code: {lacks}")
