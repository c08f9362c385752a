"""examples: each script runs where its packages are installed, and trains as without fxremat."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDED = {
    "fabric.py": ("lightning",),
    "launched.py": ("accelerate", "transformers"),
    "lightning_trainer.py": ("lightning",),
    "names.py": ("transformers",),
    "ranks.py": ("accelerate",),  # which it does not need: it runs where the others run
    "regional.py": ("accelerate", "transformers"),
    "repeated_blocks.py": ("diffusers",),
    "sft.py": ("trl",),
    "timm_train.py": ("timm",),
    "trainer.py": ("accelerate", "transformers"),
    "trainer_models.py": ("accelerate", "transformers"),
}
LAUNCHERS = {
    "launched.py": ("-m", "accelerate.commands.launch", "--cpu", "--dynamo_backend", "inductor"),
    "ranks.py": ("-m", "torch.distributed.run", "--nproc-per-node", "2"),
}
ANSWERS = {  # to what many ask or complain of; they hold losses and peaks against each other themselves
    "gradient_checkpointing.py": ("transformers",),
    "long_sequences.py": (),
    "smaller_ratio.py": (),
    "twice_through.py": (),
}


def test_every_example_is_run() -> None:
    """And is short, and told of where clients are."""
    lengths = {path.name: len(path.read_text("utf-8").splitlines()) for path in EXAMPLES.glob("*.py")}
    assert lengths.keys() == {*NEEDED, *ANSWERS}
    assert max(lengths.values()) <= 60
    docs = EXAMPLES.parent / "docs"
    told = {name: (docs / name).read_text("utf-8") for name in ("where-you-train.md", "migrate.md")}
    assert [name for name in NEEDED if f"`{name}" not in told["where-you-train.md"]] == []
    assert [name for name in ANSWERS if f"examples/{name}`" not in told["migrate.md"]] == []


@pytest.mark.parametrize("name", NEEDED)
def test_an_example_trains_as_without_fxremat(name: str) -> None:
    """With the losses of the same run without it, and a lower peak, both printed, whatever it trains."""
    for package in NEEDED[name]:
        pytest.importorskip(package, exc_type=ImportError)
    command = [sys.executable, *LAUNCHERS.get(name, ()), str(EXAMPLES / name)]
    given = {"HF_HUB_OFFLINE": "1", "FXREMAT_BUDGET": "0.6", "FXREMAT_COMPILER": "eager"}
    done = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    before: dict[str, float] = {}
    compared = set()
    for line in done.stdout.splitlines():
        text, _, figures = line.partition(" peak ")
        if " MiB, losses " not in figures and " MiB, equal losses: " not in figures:
            continue
        peak = float(figures.split()[0])
        subject, is_without, _ = text.partition("without fxremat")
        if is_without:
            before[subject] = peak
            continue
        (subject,) = (each for each in before if text.startswith(each))
        assert "equal losses: True" in figures and peak < before[subject], line
        compared.add(subject)
    assert compared == before.keys() != set()


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_holds(name: str) -> None:
    """What the example asserts of gradients and peaks, and a table of what was measured."""
    for package in ANSWERS[name]:
        pytest.importorskip(package, exc_type=ImportError)
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "MiB" in done.stdout
