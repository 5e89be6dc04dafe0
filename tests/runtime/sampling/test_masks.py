"""Masked rows take what their bits allow; other rows and all probabilities are as without masks
(`runtime/sampling/sampler.py`).
"""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moedge.runtime.sampling.draw import NO_TOKEN, Draw, TokenHistory
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.sampling.sampler import Sampler, TokenMasks, forbid

VOCAB = 300


def bits_of(allowed: torch.Tensor) -> torch.Tensor:
    """[M, V] bool to bytes, 32 tokens at a time as llguidance writes them."""
    padded = torch.nn.functional.pad(allowed, (0, -VOCAB % 32))
    return torch.from_numpy(np.packbits(padded.numpy(), axis=-1, bitorder="little"))


def draws(seed: int) -> list[Draw]:
    kinds = [
        SequenceSampling(1),
        SequenceSampling(1, temperature=1.0, seed=seed, logprobs=3),
        SequenceSampling(1, temperature=0.7, top_k=5, seed=seed),
        SequenceSampling(1, repetition_penalty=2.0),
        SequenceSampling(1, temperature=1.0, top_p=0.5, min_p=0.1, seed=seed + 1),
    ]
    history = TokenHistory([1, 2])
    return [Draw(params, row, 3, history if params.penalised else None) for row, params in enumerate(kinds * 2)]


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, VOCAB))
def test_forbidden_logits_are_minus_infinity_and_others_stay(seed: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.rand(4, VOCAB, generator=generator) < 0.5
    logits = torch.randn(4, vocab, generator=generator)
    expected = logits.masked_fill(~allowed[:, :vocab], -torch.inf)
    forbid(logits, bits_of(allowed))
    assert torch.equal(logits, expected)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.lists(st.booleans(), min_size=10, max_size=10), st.sampled_from([1, 64 << 20]))
def test_a_mask_is_the_same_as_logits_of_minus_infinity(seed: int, is_masked: list[bool], scratch: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(10, VOCAB, generator=generator)
    allowed = torch.rand(10, VOCAB, generator=generator) < 0.2
    allowed[:, 17] = True
    rows = [row for row in range(10) if is_masked[row]]
    masks = TokenMasks(rows, bits_of(allowed[rows]))
    before = logits.clone()
    found = Sampler(scratch).sample(logits, draws(seed), masks)
    assert torch.equal(logits, before)
    masked = logits.clone()
    masked[rows] = masked[rows].masked_fill(~allowed[rows], -torch.inf)
    wanted = Sampler().sample(masked, draws(seed))
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    # What a token's probability is, the model says: masks decide only whether it may be taken.
    plain = Sampler().sample(logits, draws(seed))
    for row, logprob in found.logprobs.items():
        assert logprob.top == plain.logprobs[row].top
        exact = torch.log_softmax(logits[row].double(), -1)[logprob.token_id]
        assert abs(logprob.logprob - exact) < 1e-5


def test_where_nothing_is_allowed_there_is_no_token() -> None:
    masks = TokenMasks([1], torch.zeros(1, 40, dtype=torch.uint8))
    found = Sampler().sample(torch.randn(2, VOCAB), draws(0)[:2], masks)
    assert found.token_ids[0] != NO_TOKEN
    assert found.token_ids[1] == NO_TOKEN
