"""Log probabilities are the log softmax of the logits, with ranks and the most likely alternatives
(`runtime/sampling/sampler.py`).
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moedge.runtime.sampling.sampler import token_logprobs


@given(st.integers(0, 2**32), st.integers(0, 20), st.sampled_from([21, 300, 1009]))
def test_logprobs_are_the_log_softmax_of_the_logits(seed, num_top, vocab_size):
    numbers = np.random.default_rng(seed)
    # Differences of multiples of 1/256 are exact in fp32, so equal logits are the only ties.
    logits = torch.from_numpy((numbers.normal(0, 4, (2, vocab_size)) * 256).round().astype(np.float32) / 256)
    chosen = numbers.integers(0, vocab_size, 2).tolist()
    exact = logits.double().log_softmax(-1).numpy()
    for row, found in enumerate(token_logprobs(logits, chosen, [num_top, 1])):
        best = np.argsort(-exact[row], kind="stable")[: (num_top, 1)[row]]
        assert found.token_id == chosen[row]
        assert found.logprob == pytest.approx(exact[row, chosen[row]], abs=2e-6)
        assert [token_id for token_id, _ in found.top] == best.tolist()
        assert [logprob for _, logprob in found.top] == pytest.approx(exact[row, best], abs=2e-6)
        assert found.rank == 1 + np.argsort(-exact[row], kind="stable").tolist().index(chosen[row])


def test_among_equal_tokens_rank_and_order_go_by_id():
    (found,) = token_logprobs(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]), [2], [3])
    assert [token_id for token_id, _ in found.top] == [1, 2, 3]
    assert found.rank == 2


def test_forbidden_tokens_are_not_among_the_most_likely():
    row = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf]])
    (found,) = token_logprobs(row, [0], [4])
    assert [token_id for token_id, _ in found.top] == [2, 0]
    assert sum(math.exp(logprob) for _, logprob in found.top) == pytest.approx(1.0)


def test_no_alternatives_asked_for_still_gives_the_chosen_token():
    (found,) = token_logprobs(torch.zeros(1, 4), [3], [0])
    assert (found.top, found.rank) == ((), 4)
    assert found.logprob == pytest.approx(math.log(0.25))


def test_extreme_logits_give_finite_logprobs():
    (found,) = token_logprobs(torch.tensor([[1e30, 1e30, -1e30]]), [0], [2])
    assert found.logprob == pytest.approx(math.log(0.5))
