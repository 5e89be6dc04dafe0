"""Biases, forbidden and forced tokens (`runtime/sampling/sampler.py`): what they do to one row, and that they leave the
others alone.
"""

import torch

from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.sampling.draw import Draw
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.sampling.sampler import Sampler

LOGITS = torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 3)


def taken(*draws: Draw) -> list[int]:
    return Sampler().sample(LOGITS[: len(draws)].clone(), draws).token_ids.tolist()  # type: ignore[no-any-return]


def greedy(**fields: object) -> Draw:
    params = {name: fields.pop(name) for name in ("logit_bias", "min_tokens") if name in fields}
    return Draw(SequenceSampling(9, **params), 0, 0, **fields)  # type: ignore[arg-type]


def test_a_bias_is_added_before_the_token_is_taken() -> None:
    assert taken(greedy(), greedy(logit_bias=((0, 3.5),)), greedy(logit_bias=((3, -100.0), (2, -100.0)))) == [3, 0, 1]


def test_a_bias_beyond_the_vocabulary_changes_nothing() -> None:
    assert taken(greedy(logit_bias=((9, 100.0),))) == [3]


def test_a_forbidden_token_is_not_taken_and_a_forced_one_is() -> None:
    assert taken(greedy(forbidden=(3,)), greedy(forced=1), greedy()) == [2, 1, 3]


def test_sampling_never_takes_what_is_forbidden() -> None:
    draws = [Draw(SequenceSampling(9, temperature=1.0, seed=seed), 0, 0, forbidden=(2, 3)) for seed in range(200)]
    assert set(Sampler().sample(LOGITS[:1].expand(200, 4), draws).token_ids.tolist()) == {0, 1}


def test_log_probabilities_stay_the_models_own() -> None:
    plain, forced = Draw(SequenceSampling(9, logprobs=0), 0, 0), Draw(SequenceSampling(9, logprobs=0), 0, 0, forced=0)
    found = Sampler().sample(LOGITS[:2].clone(), [plain, forced]).logprobs
    assert [found[0].token_id, found[1].token_id] == [3, 0]
    assert found[0].logprob - found[1].logprob == 3.0


def test_nothing_ends_a_sequence_before_its_least_tokens() -> None:
    sequence = Sequence([5], SequenceSampling(9, min_tokens=2, stop_token_ids=(7,)), frozenset({1}))
    assert sequence.forbidden == (1, 7)
    sequence.append(0, None)
    sequence.append(0, None)
    assert sequence.forbidden == ()
    assert Sequence([5], SequenceSampling(9, min_tokens=2, ignore_eos=True), frozenset({1})).forbidden == ()
