"""Seeds come from names (`runtime/rows/row.py`): the same row gets the same seed wherever it stands."""

import json
import random
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moedge.runtime.rows.row import choice_seed, row_seed


def seeds_of(read: Callable[..., list[Any]], ids: list[str], **defaults: int) -> dict[str, int]:
    data = b"\n".join(json.dumps({"id": item, "prompt": "same"}).encode() for item in ids)
    return {row.id: row.params.seed for row in read(data, **defaults)}


def test_equal_prompts_get_different_seeds_that_survive_reordering(read: Callable[..., list[Any]]) -> None:
    ids = [f"r{i}" for i in range(50)]
    shuffled = random.Random(1).sample(ids, len(ids))
    seeds = seeds_of(read, ids)
    assert len(set(seeds.values())) == len(ids)
    assert seeds_of(read, shuffled) == seeds
    assert set(seeds_of(read, ids, seed=1).values()).isdisjoint(seeds.values())


def test_a_given_seed_is_used_as_it_is(short: Callable[..., Any]) -> None:
    assert [short(prompt="a", seed=seed).params.seed for seed in (0, 42)] == [0, 42]


@given(st.integers(), st.text(), st.integers(1, 200))
def test_derived_seeds_have_63_bits(seed: int, name: str, choice: int) -> None:
    assert 0 <= row_seed(seed, name) < 2**63
    assert 0 <= choice_seed(seed, choice) < 2**63


def test_derived_seeds_stay_the_same_between_versions() -> None:
    """A change here changes the answers of every job that samples: it is a new version's business to say so."""
    assert row_seed(0, "a") == 148269304741710134
    assert choice_seed(7, 1) == 8675441094046493621
