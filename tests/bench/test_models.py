"""models: every network of the zoo trains, alike from the same seed, as one graph."""

from __future__ import annotations

import pytest
import torch
from models import NAMES, case, fresh, train_step


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_finite_gradient(name: str) -> None:
    """One step gives each leaf a finite gradient that is not all zero."""
    module, inputs = fresh(case(name))
    loss, gradients = train_step(module, inputs)
    assert loss.isfinite()
    assert set(gradients) >= {name for name, _ in module.named_parameters()}
    assert all(each.isfinite().all() and each.any() for each in gradients.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides_everything(name: str) -> None:
    """Two modules of one seed have the same loss and gradients, bit for bit, dropout included."""
    (loss, gradients), (again, gradients_again) = (train_step(*fresh(case(name), seed=3)) for _ in range(2))
    assert torch.equal(loss, again)
    assert gradients.keys() == gradients_again.keys()
    assert all(torch.equal(each, gradients_again[key]) for key, each in gradients.items())


@pytest.mark.parametrize("name", NAMES)
def test_the_network_is_one_graph(name: str) -> None:
    """torch.compile takes loss and all as one graph, and gradients keep their names."""
    module, inputs = fresh(case(name))
    _, expected = train_step(module, inputs)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    _, gradients = train_step(compiled, inputs)
    assert gradients.keys() == expected.keys()


def test_euler_holds_for_the_homogeneous_network() -> None:
    """For y(cx) = c y(x), the gradient times the input is the output."""
    module, inputs = fresh(case("homogeneous"))
    loss, gradients = train_step(module, inputs)
    torch.testing.assert_close((gradients["inputs.0"] * inputs[0]).sum(), loss)
