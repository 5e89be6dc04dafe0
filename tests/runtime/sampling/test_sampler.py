import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from moedge.quant.matmul.matmul import ParallelMatmul, Workspace
from moedge.runtime.sampling import sampler
from moedge.runtime.sampling.draw import NO_TOKEN, Draw, TokenHistory, uniform
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.sampling.sampler import CPU_BYTES_PER_LOGIT, Sampler

pytestmark = pytest.mark.numerics

# Odd, so that rows start at every alignment; larger than the first look, so that both ways are taken.
VOCAB = 777
SAMPLER = Sampler()
THREADS = ParallelMatmul(Workspace(0), helpers=[Workspace(0), Workspace(0)])


def logits_of(num_rows, vocab_size=VOCAB, seed=0):
    numbers = np.random.default_rng(seed)
    spread = numbers.choice([0.3, 2.0, 6.0], (num_rows, 1))
    return torch.from_numpy(numbers.normal(0, spread, (num_rows, vocab_size)).astype(np.float32))


def random_draws(num_rows, seed=0):
    numbers = np.random.default_rng(seed)
    draws = []
    for row in range(num_rows):
        history = TokenHistory(numbers.integers(0, VOCAB, 30).tolist())
        for token_id in numbers.integers(0, VOCAB, 9).tolist():
            history.append(token_id)
        params = SequenceSampling(
            max_tokens=99,
            temperature=float(numbers.choice([0.0, 0.7, 1.0, 4.0])),
            top_k=int(numbers.choice([0, 0, 40, 500])),
            top_p=float(numbers.choice([1.0, 0.9])),
            min_p=float(numbers.choice([0.0, 0.0, 0.02])),
            repetition_penalty=float(numbers.choice([1.0, 1.2])),
            presence_penalty=float(numbers.choice([0.0, 0.5])),
            frequency_penalty=float(numbers.choice([0.0, -0.3])),
            seed=int(numbers.integers(0, 2**62)),
            logprobs=(None, 0, 4)[row % 3],
        )
        draws.append(Draw(params, row % 5, row % 11, history))
    return draws


POOL, POOL_DRAWS = logits_of(64), random_draws(64)
ALONE = [SAMPLER.sample(POOL[row : row + 1], [draw]) for row, draw in enumerate(POOL_DRAWS)]


def assert_rows_as_alone(sampled, rows):
    assert sampled.token_ids.tolist() == [ALONE[row].token_ids[0] for row in rows]
    expected = {at: ALONE[row].logprobs[0] for at, row in enumerate(rows) if ALONE[row].logprobs}
    assert sampled.logprobs == expected


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 63), min_size=1, max_size=64),
    st.sampled_from([1, VOCAB * CPU_BYTES_PER_LOGIT * 5, 1 << 26]),
    st.integers(0, 5),
    st.sampled_from([None, THREADS]),
)
def test_a_row_has_the_same_tokens_and_logprobs_to_the_bit_alone_and_in_any_batch(
    rows, scratch_nbytes, offset, compute
):
    storage = torch.full((len(rows) * VOCAB + offset,), torch.nan)
    batch = storage[offset:].view(len(rows), VOCAB).copy_(POOL[rows])
    threaded = Sampler(scratch_nbytes, compute=compute)
    assert_rows_as_alone(threaded.sample(batch, [POOL_DRAWS[row] for row in rows]), rows)


@pytest.mark.parametrize(("rows", "together"), [(1, 1), (2, 2), (9, 9)])
def test_tiles_of_several_threads_share_the_scratch(rows, together, monkeypatch):
    """Three threads with room for `rows` rows: some wait, or all have tiles of several rows."""
    live, most, lock, draw = [0], [0], threading.Lock(), sampler.choose

    def counted(logits, columns):
        with lock:
            live[0] += len(logits)
            most[0] = max(most[0], live[0])
        time.sleep(1e-3)
        try:
            return draw(logits, columns)
        finally:
            with lock:
                live[0] -= len(logits)

    monkeypatch.setattr(sampler, "choose", counted)
    scratch_nbytes = rows * VOCAB * CPU_BYTES_PER_LOGIT
    draws = [Draw(SequenceSampling(1, temperature=1.0), 0, row) for row in range(64)]
    Sampler(scratch_nbytes, compute=THREADS).sample(POOL, draws)
    assert together / 2 < most[0] <= together


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_row(num_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert_rows_as_alone(SAMPLER.sample(POOL, POOL_DRAWS), range(64))
    finally:
        torch.set_num_threads(before)


def test_the_pool_of_rows_holds_every_kind():
    """Otherwise the laws above could hold because nothing was drawn, filtered or sorted in full."""
    kinds = {(draw.params.greedy, draw.params.penalised, draw.params.top_k) for draw in POOL_DRAWS}
    assert len(kinds) >= 8
    moved = [replace(draw, position=draw.position + 1) for draw in POOL_DRAWS]
    same = SAMPLER.sample(POOL, moved).token_ids == SAMPLER.sample(POOL, POOL_DRAWS).token_ids
    greedy = np.array([draw.params.greedy for draw in POOL_DRAWS])
    assert same[greedy].all()
    assert not same[~greedy].all()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_broken_rows_get_no_token_no_logprobs_and_disturb_nobody(broken):
    logits = POOL.clone()
    logits[::2, 5] = broken
    logits[4] = -torch.inf
    sampled = SAMPLER.sample(logits, POOL_DRAWS)
    assert (sampled.token_ids[::2] == NO_TOKEN).all()
    assert sampled.token_ids[1::2].tolist() == [alone.token_ids[0] for alone in ALONE[1::2]]
    assert sampled.logprobs == {row: ALONE[row].logprobs[0] for row in range(1, 64, 2) if ALONE[row].logprobs}


def test_greedy_is_the_first_largest_logit_whatever_seed_and_filters():
    logits = logits_of(50).round()
    expected = [row.index(max(row)) for row in logits.tolist()]
    for seed in (0, 1):
        params = SequenceSampling(1, top_k=5, top_p=0.3, min_p=0.5, seed=seed)
        assert SAMPLER.sample(logits, [Draw(params, 0, seed)] * 50).token_ids.tolist() == expected
    history = TokenHistory([])
    penalised = SequenceSampling(1, repetition_penalty=1.5)
    assert SAMPLER.sample(logits, [Draw(penalised, 0, 0, history)] * 50).token_ids.tolist() == expected


def test_penalties_act_on_greedy_rows_and_not_on_logprobs():
    history = TokenHistory([1])
    params = SequenceSampling(1, repetition_penalty=2.0, temperature=0.0, logprobs=2)
    sampled = SAMPLER.sample(torch.tensor([[2.0, 3.0]]), [Draw(params, 0, 0, history)])
    assert sampled.token_ids.tolist() == [0]
    assert sampled.logprobs[0].rank == 2
    assert [token_id for token_id, _ in sampled.logprobs[0].top] == [1, 0]


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_k": 12, "temperature": 0.7}, {"min_p": 0.1}])
def test_twenty_thousand_draws_follow_the_distribution(filters):
    probabilities, counts = drawn(filters)
    assert chi_square(counts, probabilities) < 5
    assert chi_square(counts, np.roll(probabilities, 1)) > 50


def test_the_distribution_test_sees_a_temperature_ten_percent_off():
    _, counts = drawn({"temperature": 1.1})
    probabilities, _ = drawn({})
    assert chi_square(counts, probabilities) > 5


def drawn(filters):
    """The kept tokens' exact probabilities, best first, and how often each came, over positions of one stream."""
    num_draws = 20_000
    row = np.random.default_rng(9).normal(0, 1.5, 30)
    params = SequenceSampling(1, **{"temperature": 1.0, **filters}, seed=11)
    logits = torch.from_numpy(row.astype(np.float32)).expand(num_draws, -1)
    found = SAMPLER.sample(logits, [Draw(params, 0, position) for position in range(num_draws)]).token_ids
    order = np.argsort(-row)
    mass = np.exp((row[order] - row.max()) / params.temperature)
    mass = mass[: params.top_k or None]
    mass = mass[mass >= params.min_p] / mass[mass >= params.min_p].sum()
    mass = mass[: 1 + int((np.cumsum(mass)[:-1] < params.top_p).sum())]
    counts = np.bincount(found, minlength=30)[order]
    assert counts[len(mass) :].sum() == 0
    return mass / mass.sum(), counts[: len(mass)]


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    degrees = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees)


def test_a_row_draws_with_the_number_of_its_seed_sample_and_position():
    """Among 2**16 equal logits the token is the number's first 16 bits."""
    streams = [(5, 0, 0), (6, 0, 0), (5, 1, 0), (5, 0, 1), (2**63 - 1, 3, 4096)]
    draws = [Draw(SequenceSampling(1, temperature=1.0, seed=seed), *rest) for seed, *rest in streams]
    found = SAMPLER.sample(torch.zeros(5, 2**16), draws).token_ids
    assert found.tolist() == [int(uniform(*stream) * 2**16) for stream in streams]
    assert len(set(found)) == 5


def test_samples_of_one_prompt_differ_and_repeat():
    params = SequenceSampling(1, temperature=5.0, seed=3)
    logits = logits_of(1).expand(20, -1)
    draws = [Draw(params, sample, 0) for sample in range(20)]
    first, second = (SAMPLER.sample(logits, draws).token_ids.tolist() for _ in range(2))
    assert first == second
    assert len(set(first)) > 10


def test_the_logits_are_left_as_they_are():
    logits = POOL.clone()
    SAMPLER.sample(logits, POOL_DRAWS)
    assert torch.equal(logits, POOL)


def test_no_rows_give_no_tokens():
    sampled = SAMPLER.sample(torch.empty(0, VOCAB), [])
    assert sampled.token_ids.tolist() == []
    assert sampled.logprobs == {}


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made under it held at one time."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and func._schema.returns[0].alias_info is None:
                storage = tensor.untyped_storage()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.free, storage.nbytes())
        return result

    def free(self, nbytes):
        self.live -= nbytes


@pytest.mark.parametrize(
    "filters", [{}, {"top_p": 0.999}, {"top_k": 15_000}, {"temperature": 0.0, "logprobs": 5}], ids=str
)
def test_temporaries_stay_within_the_scratch(filters):
    logits = torch.randn(12, 20_000)
    params = SequenceSampling(1, **{"temperature": 1.0, **filters})
    scratch_nbytes = 5 * 20_000 * CPU_BYTES_PER_LOGIT
    with LiveBytes() as tensors:
        Sampler(scratch_nbytes).sample(logits, [Draw(params, 0, row) for row in range(12)])
    assert scratch_nbytes / 8 < tensors.peak < scratch_nbytes


def test_settings_limits_history_and_random_numbers_need_no_torch():
    modules = ", ".join(f"moedge.runtime.sampling.{name}" for name in ("params", "draw"))
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("vocab_size", [1, 15, 63, 64, VOCAB, 49152])
def test_the_first_largest_of_rows_in_bfloat16_is_numpys_and_broken_rows_have_none(vocab_size):
    numbers = np.random.default_rng(vocab_size)
    # Few different numbers, so that the largest is there several times; rows are farther apart than they are long.
    whole = torch.from_numpy(numbers.integers(-9, 5, (40, vocab_size + 3)).astype(np.float32)).bfloat16()
    rows = whole[:, 1 : vocab_size + 1]
    broken = {3: torch.nan, 7: -torch.nan, 11: torch.inf}
    for row, number in broken.items():
        rows[row, numbers.integers(vocab_size)] = number
    rows[15] = -torch.inf
    rows[20, : vocab_size - 1] = -torch.inf
    expected = rows.float().numpy().argmax(-1)
    expected[[*broken, 15]] = NO_TOKEN
    draws = [Draw(SequenceSampling(max_tokens=1, temperature=0.0), 0, 0, TokenHistory([]))] * len(rows)
    assert SAMPLER.sample(rows, draws).token_ids.tolist() == expected.tolist()
