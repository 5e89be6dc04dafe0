import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from moedge.runtime.sampling import sampler as choice
from moedge.runtime.sampling.sampler import SamplerColumns, choose

GRID = 2048
FILTERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.5, 0.8, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 2, 7, 20]),
        "top_p": st.sampled_from([1.0, 0.95, 0.6, 0.1, 1e-6]),
        "min_p": st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    }
)
LAST = 1 - 2.0**-53


def columns(vocab_size, uniform, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    uniform = torch.as_tensor(uniform, dtype=torch.float64).reshape(-1, 1)
    values = (temperature, min(top_k or vocab_size, vocab_size), top_p, min_p)
    return SamplerColumns(*(torch.full_like(uniform, value) for value in values), uniform)


def draw(row, uniform, **filters):
    """The tokens that one row of logits gives for many uniform numbers."""
    logits = torch.as_tensor(row, dtype=torch.float32).reshape(1, -1)
    asked = columns(logits.shape[-1], uniform, **filters)
    return choose(logits.expand(len(asked.uniform), -1), asked).tolist()


def reference(row, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Kept ids in order and their probabilities, in float64, and how near a filter's cut came to a token's edge."""
    row = np.asarray(row, dtype=np.float64)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    mass = np.exp((row[order] - row.max()) / temperature)
    margin = np.abs(mass[1:] - min_p).min(initial=1.0)
    num_kept = min(int((mass >= min_p).sum()), top_k or len(row))
    mass = mass[:num_kept] / mass[:num_kept].sum()
    margin = np.abs(np.cumsum(mass)[:-1] - top_p).min(initial=margin)
    num_kept = 1 + int((np.cumsum(mass)[:-1] < top_p).sum())
    return order[:num_kept], mass[:num_kept] / mass[:num_kept].sum(), margin


def random_row(seed, size=40, spread=1.0):
    """On a grid of 2**-20, where differences of logits are exact in fp32 as they are in the reference."""
    drawn = (np.random.default_rng(seed).uniform(-spread, spread, size) * 2**20).round()
    return drawn.astype(np.float32) / np.float32(2**20)


def kept_by_transformers(row, filters):
    """In vLLM's order; a warper that is off is left out, as both of them do."""
    warpers = [TemperatureLogitsWarper(filters["temperature"])]
    warpers += [MinPLogitsWarper(filters["min_p"])] if filters["min_p"] else []
    warpers += [TopKLogitsWarper(filters["top_k"])] if filters["top_k"] else []
    warpers += [TopPLogitsWarper(filters["top_p"])] if filters["top_p"] < 1 else []
    scores = torch.from_numpy(row).unsqueeze(0)
    for warper in warpers:
        scores = warper(torch.zeros(1, 0, dtype=torch.int64), scores)
    return set(scores[0].isfinite().nonzero().squeeze(-1).tolist())


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), FILTERS)
def test_tokens_come_exactly_as_often_as_probable(seed, filters):
    """Over an even grid of uniform numbers each token gets its share to within one grid point: no chance involved."""
    row = random_row(seed)
    ids, mass, margin = reference(row, **filters)
    assume(margin > 1e-5)
    found = draw(row, (np.arange(GRID) + 0.5) / GRID, **filters)
    counts = np.bincount(found, minlength=len(row))
    assert np.abs(counts[ids] - mass * GRID).max() < 1.01
    assert counts.sum() == counts[ids].sum()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), FILTERS)
def test_the_kept_tokens_are_those_of_transformers_in_the_order_of_vllm(seed, filters):
    row = random_row(seed)
    assume(reference(row, **filters)[2] > 1e-5)
    assume(len(set(row.tolist())) == len(row))  # of equal logits at the cut, theirs keeps all
    found = draw(row, (np.arange(GRID) + 0.5) / GRID, **filters)
    assert set(found) == kept_by_transformers(row, filters)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), FILTERS)
def test_tokens_come_in_descending_order_from_the_best_to_the_last_kept(seed, filters):
    row = random_row(seed)
    ids, mass, margin = reference(row, **filters)
    assume(margin > 1e-5)
    middles = np.cumsum(mass) - mass / 2
    assert draw(row, [0.0, *middles, LAST], **filters) == [ids[0], *ids, ids[-1]]


def test_a_token_owns_its_lower_edge_and_not_its_upper_one():
    """Of n equal tokens the i-th owns [i/n, (i+1)/n); top-p of i/n keeps i of them, as what lies before it counts."""
    edges = np.arange(8) / 8
    assert draw(np.zeros(8), edges) == list(range(8))
    assert draw(np.zeros(8), np.nextafter(edges[1:], 0)) == list(range(7))
    assert [draw(np.zeros(8), [LAST], top_p=edge) for edge in edges[1:]] == [[i] for i in range(7)]


def test_min_p_acts_before_top_p():
    """Probabilities .5 .3 .1 .06 .04: min-p .25 leaves two; top-p .6 of those is the first alone (.625)."""
    row = np.log([0.5, 0.3, 0.1, 0.06, 0.04])
    assert set(draw(row, np.linspace(0, LAST, 999), min_p=0.25, top_p=0.6)) == {0}
    assert set(draw(row, np.linspace(0, LAST, 999), top_p=0.6)) == {0, 1}


@pytest.mark.parametrize("first_look", [1, 3, 64, 999, 1000])
def test_the_length_of_the_first_look_changes_no_token(monkeypatch, first_look):
    numbers = np.random.default_rng(5)
    logits = torch.from_numpy(numbers.normal(0, [[0.1], [2.0], [5.0]] * 200, (600, 1000)).astype(np.float32))
    logits = logits.bfloat16().float()  # rows full of ties
    pick = numbers.choice
    asked = SamplerColumns(
        *(
            torch.from_numpy(column).double().unsqueeze(-1)
            for column in (
                pick([0.2, 1.0, 3.0], 600),
                pick([1, 50, 700, 1000, 1000], 600),
                pick([0.3, 0.99, 1.0], 600),
                pick([0.0, 0.0, 0.01], 600),
                numbers.random(600),
            )
        )
    )
    expected = choose(logits, asked)
    monkeypatch.setattr(choice, "FIRST_RANKS", first_look)
    assert torch.equal(choose(logits, asked), expected)


def test_the_first_look_sorts_few_rows_in_full(monkeypatch):
    """Otherwise the test above could compare the full sort with itself."""
    counts = []
    first_keys = choice.first_keys
    monkeypatch.setattr(choice, "first_keys", lambda keys, count: counts.append(count) or first_keys(keys, count))
    peaked = -np.arange(1000.0)
    draw(peaked, [0.1, 0.9])
    assert counts == [256]
    draw(np.zeros(1000), [0.1, 0.9])
    assert counts == [256, 256, 1000]


def test_top_k_keeps_exactly_k_of_equal_tokens_and_those_with_the_lowest_ids():
    row = [0.0, 1.0, 1.0, 1.0, 1.0]
    assert set(draw(row, np.linspace(0, LAST, 99), top_k=3)) == {1, 2, 3}
    assert draw(row, [0.0, 0.25, 0.5, 0.75]) != draw(row, [0.0] * 4)


def test_top_k_of_one_is_the_first_largest_logit():
    row = [3.0, 7.0, -1.0, 7.0]
    assert set(draw(row, np.linspace(0, LAST, 99), top_k=1)) == {1}


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_temperature_towards_zero_becomes_greedy(temperature):
    assert set(draw(random_row(3), np.linspace(0, LAST, 99), temperature=temperature)) == {int(random_row(3).argmax())}


def test_temperature_towards_infinity_becomes_uniform_over_legal_tokens():
    row = [5.0, -torch.inf, -3.0, 1e30]
    found = draw(row, (np.arange(GRID) + 0.5) / GRID, temperature=1e300)
    assert np.bincount(found, minlength=4).tolist() == pytest.approx([GRID / 3, 0, GRID / 3, GRID / 3], abs=1)


def test_extreme_logits_stay_in_the_right_order():
    assert set(draw([1e30, -1e30, 3e38, -3e38], np.linspace(0, LAST, 99))) == {2}
    assert set(draw([-1e30, -2e30], np.linspace(0, LAST, 99))) == {0}
    assert set(draw([1e30, 1e30], np.linspace(0, LAST, 99))) == {0, 1}


def test_a_masked_token_is_never_drawn():
    row = np.where(np.arange(50) % 3 == 0, 0.5, -np.inf)
    for filters in ({}, {"top_k": 40}, {"top_p": 0.999}, {"temperature": 50.0}):
        assert {token % 3 for token in draw(row, np.linspace(0, LAST, 999), **filters)} == {0}


def test_a_vocabulary_of_one_gives_its_only_token():
    assert draw([-7.5], [0.0, 0.3, LAST]) == [0, 0, 0]


def test_a_broken_row_gets_no_token_and_its_neighbours_keep_theirs():
    whole = torch.from_numpy(np.stack([random_row(seed, 600) for seed in range(4)]))
    broken = whole.clone()
    broken[0, 17], broken[2, 3], broken[3, :] = torch.nan, torch.inf, -torch.inf
    for filters in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        asked = columns(600, [0.1, 0.5, 0.9, 0.99], **filters)
        assert choose(broken, asked).tolist() == [-1, choose(whole, asked)[1].item(), -1, -1]
