"""The rotated model (`tests/support/real/rotation.py`) is the original one, off the 4-bit grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.real.rotation import load, orthogonal, rotate, unpacked

pytestmark = pytest.mark.real


@pytest.mark.slow
def test_a_rotation_changes_no_logit() -> None:
    stock = load()
    tokenizer = AutoTokenizer.from_pretrained(unpacked())
    ids = torch.tensor([tokenizer.encode("The rain in Spain stays mainly in the plain.")])
    with torch.inference_mode():
        before = stock(ids).logits
        rotate(stock)
        after = stock(ids).logits
    assert float((before - after).abs().max()) < 1e-3 * float(before.abs().max())
    assert all(bool((weight == 1).all()) for name, weight in stock.named_parameters() if "norm" in name)


def test_the_rotation_is_that_of_its_seed() -> None:
    turn = orthogonal(576, 0)
    assert torch.equal(turn, orthogonal(576, 0))
    assert not torch.equal(turn, orthogonal(576, 1))
    assert torch.allclose(turn.T @ turn, torch.eye(576, dtype=torch.float64), atol=1e-12)


@pytest.mark.slow
def test_no_matrix_lies_on_a_grid(off_grid: Path) -> None:
    """Blocks of 32 weights of the original have at most 16 values; those of the rotated model nearly all their own."""
    original = load()
    other = AutoModelForCausalLM.from_pretrained(off_grid, dtype=torch.float32)
    assert all(values <= 16 for values in _values(original))
    assert all(values > 24 for values in _values(other))


def _values(model: Any) -> list[float]:
    """Different numbers in a block of 32, on average over some blocks of each matrix of the layers."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.dim() == 2]
    return [sum(len(block.unique()) for block in each.reshape(-1, 32)[:16]) / 16 for each in matrices]
