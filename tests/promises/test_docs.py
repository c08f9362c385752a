"""docs: what the documents say exists. (Their examples run as doctests, in the docs environment of tox.)"""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

import fxremat
from fxremat.cli import parser
from fxremat.options.options import COMPILERS, ON_ERROR, OWN, Options

ROOT = Path(__file__).parents[2]
PAGES = {page.name: page.read_text("utf-8") for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
README = PAGES["README.md"]


def code_blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def table_rows(text: str) -> dict[str, str]:
    """The rows of all tables by their first cell, where that is one piece of code."""
    return {row[1]: row[2] for row in re.finditer(r"^\| `([^`]+)` +\|(.*)\|$", text, re.MULTILINE)}


@pytest.mark.parametrize("block", code_blocks(README, "python"))
def test_readme_code_runs(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block runs, given a model and a batch, with graphs run as they are."""
    compile_as_asked = torch.compile

    def compile_eagerly(model: nn.Module, backend: str, options: dict[str, object]) -> object:
        return compile_as_asked(model, backend=backend, options={**options, "compiler": "eager"})

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", compile_eagerly)
    given = {"torch": torch, "nn": nn, "model": nn.Linear(4, 2), "batch": torch.ones(3, 4)}
    exec(block, given)


def test_readme_lists_the_options() -> None:
    """Each option has a row, with its default and every value that has a name."""
    rows = {name: row for name, row in table_rows(README).items() if name in OWN}
    assert tuple(rows) == OWN
    defaults = {field.name: field.default for field in fields(Options)}
    for name, row in rows.items():
        assert row.rstrip().rpartition("| ")[2].strip("` ") == repr(defaults[name]).replace("'", '"')
    for name, values in {"planner": fxremat.PLANNERS, "compiler": COMPILERS, "on_error": ON_ERROR}.items():
        assert all(f'`"{value}"`' in rows[name] for value in values)


def test_every_planner_is_described() -> None:
    """The page on planners has a row for each."""
    assert set(table_rows(PAGES["planners.md"])) >= set(fxremat.PLANNERS)


def test_every_error_is_described() -> None:
    """The page on the pass has a row for each kind of error."""
    kinds = {name for name in fxremat.__all__ if name.endswith("Error")} - {"FxrematError"}
    assert set(table_rows(PAGES["pass-api.md"])) == kinds


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page: str) -> None:
    """Whatever a page calls ``fxremat.<name>`` can be had by that name."""
    named = set(re.findall(r"\bfxremat\.([a-zA-Z_]+)", PAGES[page]))
    assert {name for name in named if not hasattr(fxremat, name)} == set()


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    """Whatever a page types after ``$ fxremat`` is a command with those options."""
    for line in re.findall(r"^\$ (?:.*&& )?fxremat (.*)$", PAGES[page], re.MULTILINE):
        assert parser.parser().parse_args(shlex.split(line)).command is not None


def test_readme_links_lead_somewhere() -> None:
    """Links of the README, which no other check follows, name files."""
    links = re.findall(r"\]\((?!http)([^)#]+)", README)
    assert [link for link in links if not (ROOT / link).is_file()] == []
