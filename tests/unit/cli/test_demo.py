"""demo: its rows on a tiny model, without generated code, and what it says where a compiler lacks."""

from __future__ import annotations

import dataclasses

import pytest

from fxremat._torch.compilers import missing_compiler
from fxremat.cli import demo
from fxremat.cli.demo import DemoRow, Sizes, format_demo, run_demo
from fxremat.errors import InvalidOptionError

TINY = Sizes(blocks=2, width=32, heads=2, time=32, batch=4)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name a C++ compiler that does not exist."""
    monkeypatch.setenv("CXX", "no-such-compiler -O2")


@pytest.fixture
def rows(no_compiler: None) -> list[DemoRow]:
    """A short demo without Inductor."""
    return run_demo(3, sizes=TINY)


def test_settings_train_alike_in_less_memory(rows: list[DemoRow]) -> None:
    """Losses agree, the first row is the unit of the ratios, and a smaller budget peaks no higher."""
    assert [(row.setting, row.budget) for row in rows] == [
        ("eager", "-"),
        ("fxremat", "0.5"),
        ("fxremat", "min"),
    ]
    assert len(rows[0].losses) == 3
    for row in rows:
        assert row.losses == pytest.approx(rows[0].losses, rel=1e-5)
    assert (rows[0].peak_ratio, rows[0].step_ratio) == (1.0, 1.0)
    assert rows[0].peak_bytes > rows[1].peak_bytes >= rows[2].peak_bytes


def test_a_missing_compiler_is_named(no_compiler: None) -> None:
    """The reason names the compiler that was looked for."""
    assert missing_compiler("cpu") == "the C++ compiler 'no-such-compiler' was not found"


def test_main_says_why_inductor_is_left_out(
    no_compiler: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a compiler the note comes first, then the table."""
    monkeypatch.setattr(demo, "run_demo", lambda steps, device: [ROW])
    assert demo.main(2, "cpu") == 0
    note, *table = capsys.readouterr().out.splitlines()
    assert note.startswith("Note: the C++ compiler 'no-such-compiler' was not found")
    assert table == format_demo([ROW]).splitlines()


ROW = DemoRow("fxremat", "min", (5.5, 3.25), 3 << 20, 0.75, 0.125, 1.5)


def test_the_table_has_units() -> None:
    """Bytes come as MiB and seconds as ms."""
    table = format_demo([ROW])
    assert " ".join(table.splitlines()[2].split()) == "fxremat min 3.2500 3.0 0.75 125 1.50"


def test_the_largest_difference_of_losses_is_told() -> None:
    """It is that of the step where the settings differ most."""
    other = dataclasses.replace(ROW, losses=(5.0, 3.0))
    assert format_demo([ROW, other]).endswith("At each of the 2 steps the losses agree to 5.0e-01.")


def test_one_step_is_too_few_to_time() -> None:
    """The first step compiles, so there must be a second."""
    with pytest.raises(InvalidOptionError, match="'steps': got 1"):
        run_demo(1)
