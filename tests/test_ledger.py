"""ledger: figures outlive the process, the first of a key counts, and nothing on disk is an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fxremat import ledger
from fxremat.ledger import Ledger

FACTS = {"kind": "test", "threads": 2}


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the facts, in a folder of its own."""
    monkeypatch.setenv("FXREMAT_CACHE_DIR", str(tmp_path / "deep" / "folder"))
    return ledger.open_ledger({**FACTS, "threads": 1}).path.parent / "test.jsonl"


def test_figures_are_read_by_the_next_process(path: Path) -> None:
    """With the name that the ledger was given."""
    first = Ledger(path, FACTS)
    first.add({"a": 1.5, "b": {"c": 2}})
    second = Ledger(path, FACTS)
    assert {key: second[key] for key in second} == {"a": 1.5, "b": {"c": 2}}
    assert second.is_kept and second.name == first.name
    assert "a" in second and "c" not in second


def test_the_first_figure_of_a_key_counts(path: Path) -> None:
    """Of two processes that measured the same, the second goes on with what the first found."""
    first, second = Ledger(path, FACTS), Ledger(path, FACTS)
    first.add({"a": 1, "b": 1})
    second.add({"a": 2, "c": 2})
    assert (second["a"], second["b"], second["c"]) == (1, 1, 2)
    assert "c" not in first
    first.refresh()
    assert first["c"] == 2
    assert {key: Ledger(path, FACTS)[key] for key in first} == {"a": 1, "b": 1, "c": 2}


def test_the_first_of_two_that_make_the_file_makes_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one takes over its name, whoever looked first."""
    link, made = os.link, []

    def late_link(source: str, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        made.append(Ledger(path, FACTS))
        link(source, target)

    monkeypatch.setattr(os, "link", late_link)
    assert Ledger(path, FACTS).name == made[0].name
    assert [each.name for each in path.parent.iterdir() if each.suffix == ".new"] == []


def test_a_folder_without_links_does_as_well(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is moved into place then."""

    def no_link(source: str, target: Path) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", no_link)
    first = Ledger(path, FACTS)
    assert first.is_kept and Ledger(path, FACTS).name == first.name


def test_lines_that_cannot_be_read_are_none(path: Path) -> None:
    """Whatever a crash or a full disk left behind; what is appended after it counts."""
    first = Ledger(path, FACTS)
    first.add({"a": 1})
    with path.open("ab") as file:
        file.write(b'\n["b"]\n{"c": 1}\n[2, 3]\n\xff\xfe\n["d", 4')
    second = Ledger(path, FACTS)
    assert list(second) == ["a"]
    second.add({"e": 5})
    assert list(Ledger(path, FACTS)) == ["a", "e"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"facts": {}, "name": 1}', '{"facts": {}, "name": "x"}\n'])
def test_a_file_of_others_is_not_taken_for_a_ledger(path: Path, text: str) -> None:
    """A header that can't be read is written anew; that of other facts is left alone."""
    path.write_text(text)
    book = Ledger(path, FACTS)
    book.add({"a": 1})
    assert book["a"] == 1
    is_foreign = text.endswith("\n")
    assert book.is_kept != is_foreign
    assert ("a" in Ledger(path, FACTS)) != is_foreign


def test_without_a_folder_figures_last_as_long_as_the_process(tmp_path: Path) -> None:
    """A ledger that can't be kept is as good as any until then, and its name is its own."""
    (tmp_path / "file").write_text("not a folder")
    first, second = (Ledger(tmp_path / "file" / "test.jsonl", FACTS) for _ in range(2))
    first.add({"a": 1})
    assert first["a"] == 1 and not first.is_kept and first.name != second.name
    first.refresh()
    assert list(first) == ["a"] and list(second) == []


def test_what_is_forgotten_is_made_anew() -> None:
    """Under another name; who still holds the old one adds nothing to the new."""
    old = ledger.open_ledger(FACTS)
    old.add({"a": 1})
    assert ledger.open_ledger(FACTS) is old
    ledger.forget(FACTS)
    new = ledger.open_ledger(FACTS)
    old.add({"b": 2})
    new.refresh()
    old.refresh()
    assert new.name != old.name and list(new) == [] and list(old) == ["a", "b"]
    ledger.forget({"kind": "never seen"})


def test_facts_have_files_of_their_own() -> None:
    """So a figure is never read where it does not hold."""
    books = [ledger.open_ledger({**FACTS, "threads": threads}) for threads in (1, 2)]
    books[0].add({"a": 1})
    assert books[0].path != books[1].path and "a" not in books[1]


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [("here", "there", "here"), ("", "there", "there/fxremat"), ("", "", "home/.cache/fxremat")],
)
def test_the_folder(monkeypatch: pytest.MonkeyPatch, own: str, xdg: str, expected: str) -> None:
    """The package's own variable, that of the desktop, or the home."""
    for name, value in (("FXREMAT_CACHE_DIR", own), ("XDG_CACHE_HOME", xdg), ("HOME", "home")):
        monkeypatch.setenv(name, value)
    assert ledger.folder() == Path(expected)
