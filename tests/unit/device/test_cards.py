"""cards: what is known of GPUs by their data sheets."""

from __future__ import annotations

import pytest
import torch

from fxremat._torch import fake_cuda
from fxremat.device import absent, rates
from fxremat.device.cards import CARDS
from fxremat.errors import FxrematError, InvalidOptionError

CUDA = torch.device("cuda")


def test_the_table_of_rates_is_an_h100() -> None:
    """To the two digits that the table has."""
    card = CARDS["h100"].rates
    for name in ("flops_per_second", "half_flops_per_second", "double_flops_per_second", "bytes_per_second"):
        assert getattr(card, name) == pytest.approx(getattr(rates.CUDA, name), rel=0.02)


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_faster_at_less_precision(name: str) -> None:
    """And has properties that Inductor may ask for."""
    card = CARDS[name]
    assert card.double_flops_per_second <= card.flops_per_second < card.half_flops_per_second
    assert card.properties.total_memory == card.memory_bytes
    assert (card.properties.major, card.properties.minor) == card.capability


def test_a_misspelt_card_is_an_error_that_suggests_one() -> None:
    """With all that there are."""
    with pytest.raises(InvalidOptionError, match="a100-40gb") as caught:
        absent.card_named("h1000")
    assert caught.value.near_matches[0] == "h100"


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is changed."""
    monkeypatch.setattr(fake_cuda, "missing", lambda: "there is no compiler")
    problem = "NVIDIA T4 can't be stood in for: there is no compiler"
    with pytest.raises(FxrematError, match=problem), absent.absent(CARDS["t4"]):
        pass


def test_supposed_rates_hold_inside() -> None:
    """Before those that are pinned, and the device counts as one that is not there."""
    before = rates.rates(CUDA)
    with rates.supposing("cuda", CARDS["t4"].rates):
        assert rates.rates(CUDA) == CARDS["t4"].rates
        assert not rates.is_present(CUDA)
        assert rates.rates(torch.device("cpu")) != CARDS["t4"].rates
    assert rates.rates(CUDA) == before
