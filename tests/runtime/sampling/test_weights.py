import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moedge.runtime.sampling.sampler import total, unit, weights


def at(temperature):
    return torch.tensor([[temperature]], dtype=torch.float64)


@given(st.integers(1, 2**20))
def test_a_whole_vocabulary_of_most_likely_tokens_just_fits_into_53_bits(vocab_size):
    assert 2.0**52 < vocab_size * unit(vocab_size) <= 2.0**53


@given(st.lists(st.floats(0, 200, width=32), min_size=1, max_size=50), st.floats(1e-3, 1e3))
def test_weights_are_exponentials_to_fp32_precision(distances, temperature):
    found = weights(torch.tensor([distances]), at(temperature), 151_936)
    exact = np.exp(-np.array(distances) / np.float64(np.float32(temperature))) * unit(151_936)
    # Rounding of the exponent counts as often as the exponent is large.
    slack = 1e-6 * np.maximum(1.0, np.array(distances) / temperature) * exact
    assert (np.abs(found[0].double().numpy() - exact) <= slack + 0.5).all()


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1.0, 1e300, 1.7e308])
def test_no_temperature_makes_a_weight_nan(temperature):
    found = weights(torch.tensor([[0.0, 1e-45, 1.0, 3e38, torch.inf]]), at(temperature), 5)
    assert found.isfinite().all()
    assert found[0, 0] == unit(5)
    assert found[0, -1] == 0.0


@pytest.mark.parametrize("vocab_size", [1, 7, 1009, 50_257, 151_936, 262_144])
def test_a_total_is_the_exact_sum_whatever_the_order(vocab_size):
    numbers = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(numbers.normal(0, 3, (2, vocab_size)).astype(np.float32))
    each = weights(logits.amax(-1, keepdim=True) - logits, at(1.0), vocab_size)
    exact = [[math.fsum(row)] for row in each.tolist()]
    shuffled = torch.from_numpy(numbers.permutation(vocab_size))
    assert total(each).tolist() == total(each[:, shuffled]).tolist() == exact
    assert each.double().cumsum(-1)[:, -1:].tolist() == exact


def test_sums_of_plain_probabilities_do_depend_on_the_order():
    numbers = np.random.default_rng(0)
    logits = torch.from_numpy(numbers.normal(0, 3, (1, 50_257)).astype(np.float32))
    plain = logits.softmax(-1)
    orders = [torch.from_numpy(numbers.permutation(50_257)) for _ in range(8)]
    assert len({plain[:, order].sum(-1).item() for order in orders}) > 1


def test_an_exponential_has_the_same_bits_wherever_it_stands():
    """The one thing that exact sums take for granted: torch.exp is a function of its argument alone."""
    values = torch.from_numpy(np.random.default_rng(1).normal(-8, 6, 20_011).astype(np.float32))
    whole = values.exp()
    for start in range(70):
        for length in (1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 256, 2_047, 2_049):
            assert torch.equal(values[start : start + length].exp(), whole[start : start + length])
            assert torch.equal(values[start : start + length].clone().exp_(), whole[start : start + length])
    columns = values[:20_010].view(-1, 3)
    assert torch.equal(columns.t().contiguous().exp().t(), whole[:20_010].view(-1, 3))
