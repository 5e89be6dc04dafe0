"""The rotated model is the original one, off the 4-bit grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.real.cases import weights_and_compute
from support.real.measure import Found, measure
from support.real.rotation import load, orthogonal, rotate

pytestmark = pytest.mark.real


def test_a_rotation_changes_no_logit(model: Path) -> None:
    stock = load(model)
    tokenizer = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
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
def test_no_matrix_lies_on_a_grid(model: Path, off_grid: Path) -> None:
    """Blocks of 32 weights of the original have at most 16 values; those of the rotated model nearly all their own."""
    original = load(model)
    other = AutoModelForCausalLM.from_pretrained(off_grid, dtype=torch.float32)
    assert all(values <= 16 for values in _values(original))
    assert all(values > 24 for values in _values(other))


def _values(model: Any) -> list[float]:
    """Different numbers in a block of 32, on average over some blocks of each matrix of the layers."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.dim() == 2]
    return [sum(len(block.unique()) for block in each.reshape(-1, 32)[:64]) / 64 for each in matrices]


@pytest.fixture(scope="module")
def found(off_grid: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    results = measure(off_grid, weights_and_compute(), tmp_path_factory.mktemp("rotated"), 2, 4)
    assert all(isinstance(each, Found) for each in results.values()), results
    return {f"{case.quant} {case.compute}": each for case, each in results.items() if isinstance(each, Found)}


@pytest.mark.slow
def test_eight_bits_lose_no_more_than_a_hundredth_off_the_grid(found: dict[str, Found]) -> None:
    exact = found["none float"].perplexity
    assert [found[name].perplexity for name in ("int8 float", "int8 int8")] == pytest.approx([exact] * 2, rel=0.01)


@pytest.mark.slow
def test_four_bits_lose_what_the_quality_page_says(found: dict[str, Found]) -> None:
    """Formats in the order in which `auto` and the page rank them."""
    losses = [
        found[name].perplexity / found["none float"].perplexity - 1
        for name in ("int4 float", "nf4 float", "mxfp4 float")
    ]
    assert losses == sorted(losses)
    assert losses[-1] < 1
