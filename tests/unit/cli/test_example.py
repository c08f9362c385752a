"""example: what MODEL may name, what it must return, and how each mistake is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from fxremat.cli.example import Example, example_of, load
from fxremat.errors import InvalidOptionError

SOURCE = """
import torch
from torch import nn

import beside

def build():
    return beside.linear(), (torch.ones(3, 2, requires_grad=True),), torch.sum

def not_a_tuple(): return nn.Linear(2, 2)
def too_long(): return 1, 2, 3, 4
def no_model(): return torch.sum, ()
def bare_argument(): return nn.Linear(2, 2), torch.ones(2)
def number_as_loss(): return nn.Linear(2, 2), (torch.ones(2),), 0.5
def with_argument(size): return nn.Linear(size, size), ()
def raises(): raise KeyError("width")
constant = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a model file, a module beside it, and files that cannot be imported."""
    known = set(sys.modules)
    (tmp_path / "tiny.py").write_text(SOURCE)
    (tmp_path / "beside.py").write_text("from torch import nn\ndef linear(): return nn.Linear(2, 2)\n")
    (tmp_path / "broken.py").write_text("raise ZeroDivisionError('no batch')\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


@pytest.mark.parametrize("place", ["tiny.py", "{folder}/tiny.py", "tiny"])
def test_a_function_is_found_by_file_and_by_module(folder: Path, place: str) -> None:
    """A path, absolute or not, and a module of the working directory lead to the same function."""
    example = example_of(f"{place.format(folder=folder)}:build")
    assert isinstance(example.model, nn.Linear)
    assert example.args[0].shape == (3, 2)
    assert example.loss is torch.sum


def test_a_dotted_module_is_imported() -> None:
    """A module of an installed package needs no file."""
    assert load("planner", "collections.abc:Mapping").__name__ == "Mapping"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("tiny.py", "expected package.module:function or path/to/file.py:function, got 'tiny.py': name a"),
        ("nowhere.py:build", "there is no file 'nowhere.py'"),
        ("nowhere:build", "importing 'nowhere' raised ModuleNotFoundError: No module named 'nowhere'"),
        ("nowhere:build", f"--debug shows more. fxremat runs in {sys.executable}: install it there."),
        ("broken.py:build", "importing 'broken.py' raised ZeroDivisionError: no batch"),
        ("leaves.py:build", "importing 'leaves.py' raised SystemExit: 3"),
        ("tiny.py:bild", "'tiny.py' has no function 'bild'. Did you mean 'build'"),
        ("tiny.py:constant", "'tiny.py' has no function 'constant'"),
        ("tiny.py:not_a_tuple", "must return (model, args) or (model, args, loss): got Linear"),
        ("tiny.py:too_long", "got a tuple of 4"),
        ("tiny.py:no_model", "model is builtin_function_or_method, not an nn.Module"),
        ("tiny.py:bare_argument", "args is Tensor, not a tuple; for one argument write (x,)"),
        ("tiny.py:number_as_loss", "loss is float, which cannot be called"),
        ("tiny.py:with_argument", "raised TypeError: with_argument() missing 1 required positional argument"),
        ("tiny.py:raises", "calling 'tiny.py:raises' raised KeyError: 'width' ("),
    ],
)
def test_each_mistake_has_its_message(folder: Path, reference: str, message: str) -> None:
    """The error names MODEL, what was looked for, and what the user's own code raised."""
    with pytest.raises(InvalidOptionError) as caught:
        example_of(reference)
    assert caught.value.option == "MODEL"
    assert message in str(caught.value)


def test_the_users_error_is_chained(folder: Path) -> None:
    """Nothing of a failed import is lost: a traceback shows the user's line."""
    with pytest.raises(InvalidOptionError) as caught:
        load("planner", "broken.py:plan")
    assert caught.value.option == "planner"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_step_starts_without_gradients() -> None:
    """Two steps leave the gradients of one, in parameters and in arguments."""
    given = torch.ones(3, 2, requires_grad=True)
    example = Example(nn.Linear(2, 1, bias=False), (given,), torch.sum)
    for _ in range(2):
        example.take_step(example.loss_of)
    assert example.model.weight.grad.tolist() == [[3.0, 3.0]]  # type: ignore[union-attr, operator]
    assert torch.equal(given.grad, example.model.weight.detach().expand(3, 2))  # type: ignore[arg-type, operator]


@pytest.mark.parametrize(
    ("model", "got"),
    [
        (nn.Linear(2, 4), "a tensor of shape (3, 4)"),
        (nn.LSTM(2, 4), "a tuple of 2"),
        (nn.Linear(2, 1).requires_grad_(False), "a tensor of shape (3, 1), without a gradient"),
    ],
)
def test_a_step_needs_a_scalar(model: nn.Module, got: str) -> None:
    """What has no gradient to start from is refused with what it is and what to return instead."""
    example = Example(model, (torch.ones(3, 2),))
    with pytest.raises(InvalidOptionError) as caught:
        example.take_step(example.loss_of)
    assert f"got {got}. Return (model, args, loss)" in str(caught.value)


def test_a_step_that_raises_is_told_with_the_users_line() -> None:
    """Here that of the loss, in this file."""
    example = Example(nn.Linear(2, 2), (torch.ones(3, 2),), lambda y: y.depth)
    with pytest.raises(InvalidOptionError, match=r"a step raised AttributeError: .*test_example\.py:\d+\)"):
        example.check()
    Example(nn.Linear(2, 2), (torch.ones(3, 2),), torch.sum).check()


def test_the_peak_is_that_of_a_step() -> None:
    """Eager holds 8 results of tanh of 1 KiB, then two gradients, and the scalar throughout."""
    given = torch.randn(256, requires_grad=True)
    example = Example(nn.Sequential(*(nn.Tanh() for _ in range(8))), (given,), torch.sum)
    peak = example.peak_bytes(example.loss_of)
    assert 8 * 1024 < peak <= 10 * 1024 + 64
    assert given.grad is None
