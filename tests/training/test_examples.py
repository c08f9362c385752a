"""examples: each script runs where its packages are installed, and trains as without fxremat."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDED = {
    "fabric.py": "lightning",
    "gradient_checkpointing.py": "transformers",
    "names.py": "transformers",
    "regional.py": "accelerate",
    "repeated_blocks.py": "diffusers",
    "trainer.py": "accelerate",
}
ANSWERS = ("long_sequences.py", "smaller_ratio.py", "twice_through.py")  # to complaints that many make


def test_every_example_is_run() -> None:
    """And is short."""
    lengths = {path.name: len(path.read_text("utf-8").splitlines()) for path in EXAMPLES.glob("*.py")}
    assert lengths.keys() == {*NEEDED, *ANSWERS}
    assert max(lengths.values()) <= 60


@pytest.mark.parametrize("name", NEEDED)
def test_an_example_trains_as_without_fxremat(name: str) -> None:
    """With the losses of the same run without it, and a lower peak, both printed."""
    pytest.importorskip(NEEDED[name])
    if name in ("regional.py", "trainer.py"):
        pytest.importorskip("transformers")
    command = [sys.executable, str(EXAMPLES / name)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if " peak " in line and " MiB, " in line]
    assert all("equal losses: True" in line for line in lines[1:]) and len(lines) > 1
    peaks = [float(line.partition(" peak ")[2].split()[0]) for line in lines]
    assert max(peaks[1:]) < peaks[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_holds(name: str) -> None:
    """What the example asserts of gradients and peaks, and a table of what was measured."""
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "fxremat" in done.stdout and "MiB" in done.stdout
