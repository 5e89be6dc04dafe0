"""Repetition, presence and frequency penalties follow their definitions (`runtime/sampling/sampler.py`)."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from moedge.runtime.sampling.draw import Draw, TokenHistory
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.sampling.sampler import penalise

VOCAB = 40
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=25)
PENALTIES = st.tuples(st.sampled_from([1.0, 0.5, 1.3]), st.sampled_from([0.0, 0.7]), st.sampled_from([0.0, -0.4]))


def draw_of(prompt, output, repetition=1.0, presence=0.0, frequency=0.0):
    history = TokenHistory(prompt)
    for token_id in output:
        history.append(token_id)
    params = SequenceSampling(1, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    return Draw(params, 0, len(output), history)


def reference(row, prompt, output, repetition, presence, frequency):
    """The definition of vLLM and OpenAI, one token at a time in float64."""
    row = row.astype(np.float64)
    for token_id in {*prompt, *output}:
        row[token_id] = row[token_id] / repetition if row[token_id] > 0 else row[token_id] * repetition
    for token_id in set(output):
        row[token_id] -= frequency * output.count(token_id) + presence
    return row


@given(st.lists(st.tuples(TOKENS, TOKENS, PENALTIES), min_size=1, max_size=5), st.integers(0, 2**32))
def test_penalties_follow_their_definition_in_every_row(rows, seed):
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 5
    before = logits.numpy().copy()
    penalise(logits, [draw_of(prompt, output, *penalty) for prompt, output, penalty in rows])
    for found, row, (prompt, output, penalty) in zip(logits.numpy(), before, rows, strict=True):
        np.testing.assert_allclose(found, reference(row, prompt, output, *penalty), rtol=1e-5, atol=1e-5)
        untouched = sorted(set(range(VOCAB)) - {*prompt, *output})
        assert (found[untouched] == row[untouched]).all()


@given(TOKENS.filter(bool), st.sampled_from([0.7, 1.05, 1.3, 2.0]))
def test_repetition_has_the_bits_of_transformers(seen, repetition):
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(len(seen)))
    theirs = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([seen]), logits.clone())
    half = len(seen) // 2
    penalise(logits, [draw_of(seen[:half], seen[half:], repetition)])
    assert torch.equal(logits, theirs)


def test_presence_and_frequency_ignore_the_prompt():
    logits = torch.ones(1, 4)
    penalise(logits, [draw_of([0, 0, 1], [1, 2, 2], presence=0.5, frequency=0.25)])
    assert logits.tolist() == [[1.0, 0.25, 0.0, 1.0]]


def test_a_masked_token_stays_masked():
    logits = torch.full((1, 3), -torch.inf)
    penalise(logits, [draw_of([0], [1], repetition=0.5, presence=-2.0, frequency=-2.0)])
    assert (logits == -torch.inf).all()


def test_prompt_tokens_without_a_logit_are_passed_over():
    logits = torch.ones(1, 4)
    penalise(logits, [draw_of([1, 4, 4000], [], repetition=2.0)])
    assert logits.tolist() == [[1.0, 0.5, 1.0, 1.0]]


def test_rows_without_penalties_are_not_looked_at():
    logits = torch.tensor([[torch.nan, 1.0], [2.0, 4.0]])
    penalise(logits, [Draw(SequenceSampling(1), 0, 0), draw_of([1], [], repetition=2.0)])
    assert logits[0].isnan().tolist() == [True, False]
    assert logits[1].tolist() == [2.0, 2.0]
