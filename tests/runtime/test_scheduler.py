"""Schedules end, waste no pass, never preempt the oldest, and never show in the tokens."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moedge.apps.serve.policy import interactive_first
from moedge.runtime.engine.engine import Engine
from moedge.runtime.engine.scheduler import PassLimits, Scheduler
from moedge.runtime.engine.sequence import Batch, Sequence, TokenChunk
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import KVPool
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.sampling.sampler import Sampler
from moedge.runtime.shape.model_shape import KVGroup
from support.oracle import foresee

VOCAB, BLOCK, WINDOW = 50, 4, 9


def next_token(token_ids: list[int]) -> int:
    return hashlib.blake2b(bytes(token_ids)).digest()[0] % VOCAB


def one_hot(token_ids: list[int]) -> torch.Tensor:
    row = torch.zeros(VOCAB)
    row[next_token(token_ids)] = 1.0
    return row


class FakeModel:
    """Its next token is a hash of all tokens that the cache returns: wrong blocks, or stale ones, are other tokens."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.batches: list[Batch] = []

    def forward(self, batch: Batch) -> torch.Tensor:
        self.batches.append(batch)
        for chunk in batch.chunks:
            assert batch.positions[0, chunk.begin : chunk.end].tolist() == list(
                range(chunk.past, chunk.past + chunk.count)
            )
            self._write(chunk, batch.token_ids[0, chunk.begin : chunk.end])
        logits = [self._logits(chunk, chunk.drafted) for chunk in batch.chunks for _ in chunk.sampling]
        logits += [one_hot(sequence.prompt_ids[:position]) for sequence, position in batch.scoring]
        logits += [self._logits(chunk, left) for chunk in batch.chunks for left in reversed(range(chunk.drafted))]
        assert len(logits) == len(batch.logit_rows)
        return torch.stack(logits) if logits else torch.zeros(0, VOCAB)

    def _write(self, chunk: TokenChunk, token_ids: torch.Tensor) -> None:
        positions = torch.arange(chunk.past, chunk.past + chunk.count)
        stored = token_ids.float().view(-1, 1, 1).expand(-1, 1, 2)
        for pool, blocks in zip(self.cache.pools, chunk.sequence.table.blocks, strict=True):
            pool.write(0, torch.tensor(blocks)[positions // BLOCK], positions % BLOCK, stored, stored)

    def _logits(self, chunk: TokenChunk, behind: int) -> torch.Tensor:
        """Those of the row that has `behind` others of its chunk behind it."""
        end = chunk.past + chunk.count - behind
        everything, windowed = (self._read(chunk, group, end) for group in range(2))
        assert windowed == everything[max(0, end - WINDOW) :], "a block behind the window was freed too early"
        return one_hot(everything)

    def _read(self, chunk: TokenChunk, group: int, end: int) -> list[int]:
        first = self.cache.groups[group].spec.group.first_visible(end - 1)
        blocks = chunk.sequence.table.blocks[group][first // BLOCK : -(-end // BLOCK)]
        out = torch.empty(2, 1, len(blocks) * BLOCK, 2)
        self.cache.pools[group].gather(0, torch.tensor(blocks), out)
        begin = first // BLOCK * BLOCK
        return out[0, 0, first - begin : end - begin, 0].int().tolist()


def make_engine(
    blocks: int, limits: PassLimits, parked: int = 0, sharing: bool = True, windowed: int | None = None
) -> Engine:
    specs = [KVSpec(KVGroup((0,), 1, 2, None), "fp32", BLOCK), KVSpec(KVGroup((1,), 1, 2, WINDOW), "fp32", BLOCK)]
    pools = [KVPool(spec, count) for spec, count in zip(specs, (blocks, windowed or blocks), strict=True)]
    host = [torch.zeros(parked, spec.block_nbytes, dtype=torch.uint8) for spec in specs] if parked else None
    cache = KVCache(pools, sharing=sharing, host_slots=host)
    scheduler = Scheduler(limits, cache)
    scheduler.policy = interactive_first
    return Engine(FakeModel(cache), scheduler, Sampler())


def assert_tight(scheduler: Scheduler) -> None:
    """No table holds more blocks than its stored tokens need, and nothing of a draft is left."""
    for sequence in scheduler.running:
        table, groups = sequence.table, scheduler.cache.groups
        assert table.num_grown == table.num_tokens == sequence.num_tokens - sequence.num_pending
        assert not sequence.drafted
        for group, blocks in zip(groups, table.blocks, strict=True):
            assert len(blocks) == group.spec.blocks_for(table.num_tokens)


def alone(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


# Half of the prompts begin alike, so that rows find each other's blocks.
prompts = st.tuples(st.booleans(), st.lists(st.integers(0, 3), min_size=1, max_size=10), st.integers(0, 10)).map(
    lambda parts: [7] * parts[2] * parts[0] + parts[1]
)
jobs = st.lists(st.tuples(prompts, st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=12)


@pytest.mark.sample("20")
@pytest.mark.parametrize("examples", [20, 60])
def test_tokens_do_not_depend_on_the_schedule(examples: int) -> None:
    """Case M10 of the failure table. Nor on the tokens that passes draft, right or wrong."""
    free = st.lists(st.integers(1, 30), max_size=4).map(tuple)
    schedules = (
        st.integers(8, 30), st.integers(1, 24), st.integers(1, 12), st.sampled_from([0, 3, 40]), st.booleans(), free,
    )  # fmt: skip
    settings(max_examples=examples, deadline=None)(given(jobs, *schedules)(tokens_are_those_of_rows_alone))()


def tokens_are_those_of_rows_alone(
    rows: list[tuple[list[int], int, int]],
    blocks: int,
    tokens_per_pass: int,
    max_sequences: int,
    parked: int,
    sharing: bool,
    free: tuple[int, ...],
) -> None:
    limits = PassLimits(tokens_per_pass, max_sequences, free_tokens=free)
    engine = make_engine(blocks, limits, parked, sharing, windowed=4)
    samples = []
    for prompt, count, num_samples in rows:
        first, *forks = [
            foresee(Sequence(prompt, SequenceSampling(count)), alone(prompt, count)) for _ in range(num_samples)
        ]
        first.forks = forks
        samples.append([first, *forks])
        engine.add(first)
    limit = 50 * sum((len(prompt) + count) * num_samples for prompt, count, num_samples in rows)
    while engine.busy:
        oldest = (engine.scheduler.running or [None])[0]
        engine.step()
        assert_tight(engine.scheduler)
        assert oldest is None or oldest.finished or oldest in engine.scheduler.running, "the oldest was preempted"
        limit -= 1
        assert limit > 0, "the schedule does not end"
    for sequences, (prompt, count, _) in zip(samples, rows, strict=True):
        for sequence in sequences:
            assert sequence.output_ids == alone(prompt, count)
            assert sequence.finish_reason == "length"
    assert all(group.allocator.num_live == 0 for group in engine.scheduler.cache.groups)
    for batch in engine.model.batches:
        assert 0 < batch.num_tokens <= tokens_per_pass
        assert len(batch.sampling) <= max_sequences
        assert len(batch.logit_rows) <= max(limits.live, *free, 1)
        assert not batch.drafted or len(batch.logit_rows) <= max(free)


@given(jobs, st.integers(8, 30), st.integers(1, 24), st.integers(1, 12), st.sampled_from([0, 3, 40]), st.booleans())
@settings(max_examples=12, deadline=None)
def test_every_prompt_token_is_scored_once_and_a_pass_has_logits_for_its_sequences_only(
    rows: list[tuple[list[int], int, int]],
    blocks: int,
    tokens_per_pass: int,
    max_sequences: int,
    parked: int,
    sharing: bool,
) -> None:
    """Whatever is shared, chunked, preempted or parked; every second row is scored."""
    limits = PassLimits(tokens_per_pass, max_sequences)
    engine = make_engine(blocks, limits, parked, sharing, windowed=4)
    samples = []
    for index, (prompt, count, num_samples) in enumerate(rows):
        params = SequenceSampling(count, prompt_logprobs=2 if index % 2 else None, logprob_start_len=index // 2)
        first, *forks = [Sequence(prompt, params) for _ in range(num_samples)]
        for fork in forks:
            fork.prompt_logprobs = first.prompt_logprobs
        first.forks = forks
        samples.append([first, *forks])
        engine.add(first)
    list(engine.run())
    for index, (sequences, (prompt, count, _)) in enumerate(zip(samples, rows, strict=True)):
        for sequence in sequences:
            assert sequence.output_ids == alone(prompt, count)
            found = [] if sequence.prompt_logprobs is None else sequence.prompt_logprobs.tokens
            start = max(1, index // 2)
            wanted = [one_hot(prompt[:position]).log_softmax(-1) for position in range(start, len(prompt))]
            assert [each.token_id for each in found] == (prompt[start:] if index % 2 else [])
            for each, row in zip(found, wanted, strict=bool(index % 2)):
                assert each.logprob == pytest.approx(float(row[each.token_id]), abs=1e-5)
                assert each.top[0][0] == int(row.argmax())
    for batch in engine.model.batches:
        assert len(batch.logit_rows) <= limits.live


def test_what_comes_before_the_scored_tokens_is_taken_from_the_cache() -> None:
    engine = make_engine(100, PassLimits(200, 8))
    prompt = [5] * 40
    first = Sequence(prompt, SequenceSampling(1, prompt_logprobs=0, logprob_start_len=38))
    other = Sequence([*prompt[:39], 6], SequenceSampling(1, prompt_logprobs=0, logprob_start_len=38))
    engine.add(first)
    engine.add(other)
    list(engine.run())
    assert (
        engine.scheduler.counts.prefix_hit_tokens
        == 37 // engine.scheduler.cache.block * engine.scheduler.cache.block
        > 0
    )
    assert [each.prompt_logprobs is not None and len(each.prompt_logprobs.tokens) for each in (first, other)] == [2, 2]


def test_logits_of_a_prompt_that_are_not_finite_fail_its_sequences_and_no_other() -> None:
    engine = make_engine(100, PassLimits(4, 3))
    prompt = [7] * 6
    first, fork, other = (Sequence(prompt, SequenceSampling(3, prompt_logprobs=score)) for score in (0, 0, None))
    first.forks, fork.prompt_logprobs = [fork], first.prompt_logprobs
    forward = engine.model.forward

    def broken(batch: Batch) -> torch.Tensor:
        logits = forward(batch)
        for row, (_, position) in enumerate(batch.scoring, len(batch.sampling)):
            if position == 2:
                logits[row, 0] = torch.nan
        return logits

    engine.model.forward = broken  # type: ignore[method-assign]
    engine.add(first)
    engine.add(other)
    list(engine.run())
    assert [each.finish_reason for each in (first, fork, other)] == ["error", "error", "length"]
    assert first.error == "the model's logits are not finite numbers"


def run_alike(engine: Engine, count: int = 6) -> list[list[int]]:
    sequences = [Sequence([start] * 3, SequenceSampling(20)) for start in range(count)]
    for sequence in sequences:
        engine.add(sequence)
    list(engine.run())
    return [sequence.output_ids for sequence in sequences]


def test_what_is_parked_can_be_given_up_and_is_computed_again() -> None:
    engine = make_engine(7, PassLimits(64, 8), 50, sharing=False)
    sequences = [Sequence([start] * 3, SequenceSampling(20)) for start in range(6)]
    for sequence in sequences:
        engine.add(sequence)
    while not any(sequence.table.parked for sequence in engine.scheduler.waiting):
        engine.step()
    engine.scheduler.forget_parked()
    parked = engine.scheduler.counts.parked
    list(engine.run())
    assert [sequence.output_ids for sequence in sequences] == [alone([start] * 3, 20) for start in range(6)]
    assert engine.scheduler.counts.recomputed_tokens > 0
    assert engine.scheduler.counts.parked == parked


def test_an_abort_between_passes_frees_every_block_parked_ones_too() -> None:
    engine = make_engine(7, PassLimits(64, 8), 50, sharing=False)
    for start in range(6):
        engine.add(Sequence([start] * 3, SequenceSampling(20)))
    while not any(sequence.table.parked for sequence in engine.scheduler.waiting):
        engine.step()
    cache = engine.scheduler.cache
    assert any(tier.allocator.num_live for tier in cache.host.tiers)
    engine.scheduler.abort()
    assert not engine.busy
    assert {group.allocator.num_live for group in cache.groups} == {0}
    assert {tier.allocator.num_live for tier in cache.host.tiers} == {0}
    assert run_alike(engine) == [alone([start] * 3, 20) for start in range(6)]


def test_a_small_pool_preempts_and_an_ample_one_does_not() -> None:
    """The counters that make the law above mean something."""
    counts, tokens = [], []
    for blocks, parked in ((7, 0), (7, 50), (100, 0)):
        engine = make_engine(blocks, PassLimits(64, 8), parked, sharing=False)
        tokens.append(run_alike(engine))
        counts.append(engine.scheduler.counts)
    assert tokens[0] == tokens[1] == tokens[2]
    computed, parked, ample = counts
    assert computed.preemptions > 0
    assert computed.recomputed_tokens > 0 == computed.parked
    assert parked.parked == parked.preemptions > 0 == parked.recomputed_tokens
    assert ample.preemptions == 0


def test_a_shared_beginning_is_computed_once_even_in_the_first_pass() -> None:
    shared, rows = [7] * 16, 5
    computed = []
    for sharing in (True, False):
        engine = make_engine(100, PassLimits(256, 8), sharing=sharing)
        for row in range(rows):
            engine.add(Sequence([*shared, row], SequenceSampling(2)))
        engine.step()
        assert len(engine.model.batches[0].chunks) == rows
        usage = engine.scheduler.cache.usage(sequence.table for sequence in engine.scheduler.running)
        assert (usage.shared > 0) == sharing
        list(engine.run())
        computed.append(engine.metrics.prompt_tokens)
        assert engine.metrics.prompt_tokens + engine.scheduler.counts.prefix_hit_tokens == rows * 17
    assert computed == [16 + rows, rows * 17]


def test_the_prompt_of_many_samples_is_computed_once() -> None:
    engine = make_engine(100, PassLimits(64, 8))
    first, *forks = [Sequence([3, 1, 4, 1, 5], SequenceSampling(6)) for _ in range(4)]
    first.forks = forks
    engine.add(first)
    list(engine.run())
    assert [len(batch.sampling) for batch in engine.model.batches] == [4] * 6
    assert engine.metrics.prompt_tokens == 5
    assert engine.scheduler.counts.prefix_hit_tokens == 15
    assert {tuple(sequence.output_ids) for sequence in (first, *forks)} == {tuple(alone([3, 1, 4, 1, 5], 6))}


def test_more_samples_than_places_are_generated_a_few_at_a_time() -> None:
    engine = make_engine(100, PassLimits(64, 3))
    first, *forks = [Sequence([3, 1, 4, 1, 5], SequenceSampling(6)) for _ in range(7)]
    first.forks = forks
    engine.add(first)
    list(engine.run())
    assert max(len(batch.sampling) for batch in engine.model.batches) == 3
    # The others find the prompt's full block and compute its last token again.
    assert engine.metrics.prompt_tokens == 5 + 4
    assert all(sequence.output_ids == alone([3, 1, 4, 1, 5], 6) for sequence in (first, *forks))


def test_decoding_sequences_and_prompts_share_passes() -> None:
    engine = make_engine(100, PassLimits(16, 8))
    engine.add(Sequence([1] * 4, SequenceSampling(10)))
    engine.step()
    engine.add(Sequence([2] * 40, SequenceSampling(2)))
    engine.step()
    batch = engine.model.batches[-1]
    assert [chunk.count for chunk in batch.chunks] == [1, 15]
    assert [chunk.samples for chunk in batch.chunks] == [True, False]


def test_a_long_prompt_passes_through_a_windowed_pool_that_is_smaller_than_it() -> None:
    engine = make_engine(100, PassLimits(64, 8), windowed=4)
    sequence = Sequence([2] * 60, SequenceSampling(30))
    engine.add(sequence)
    list(engine.run())
    assert sequence.output_ids == alone([2] * 60, 30)
    assert engine.scheduler.counts.preemptions == 0


def test_a_sequence_that_never_fits_is_refused() -> None:
    engine = make_engine(2, PassLimits(16, 8))
    with pytest.raises(ValueError, match="never fit"):
        engine.add(Sequence([1] * 4, SequenceSampling(5)))
    engine.add(Sequence([1] * 4, SequenceSampling(4)))


def test_eos_stop_ids_and_ignore_eos_end_or_do_not_end() -> None:
    prompt = [3, 1, 4]
    out = alone(prompt, 12)
    for params, eos, wanted, reason in (
        (SequenceSampling(12), {out[3]}, out[: out.index(out[3]) + 1], "stop"),
        (SequenceSampling(12, ignore_eos=True), {out[3]}, out, "length"),
        (SequenceSampling(12, stop_token_ids=(out[5],)), set(), out[: out.index(out[5]) + 1], "stop"),
    ):
        engine = make_engine(20, PassLimits(16, 8))
        sequence = Sequence(prompt, params, frozenset(eos))
        engine.add(sequence)
        list(engine.run())
        assert (sequence.output_ids, sequence.finish_reason) == (wanted, reason)


def test_a_row_with_broken_logits_fails_alone() -> None:
    class Broken(FakeModel):
        def forward(self, batch: Batch) -> torch.Tensor:
            logits = super().forward(batch)
            for row, sequence in enumerate(batch.sampling):
                if sequence.prompt_ids[0] == 9 and len(sequence.output_ids) == 2:
                    logits[row, 7] = float("nan")
            return logits

    engine = make_engine(50, PassLimits(16, 8))
    engine.model = Broken(engine.scheduler.cache)
    sequences = [Sequence([start], SequenceSampling(6)) for start in (8, 9, 10)]
    for sequence in sequences:
        engine.add(sequence)
    list(engine.run())
    assert [sequence.finish_reason for sequence in sequences] == ["length", "error", "length"]
    assert len(sequences[1].output_ids) == 2
    assert sequences[0].output_ids == alone([8], 6)


row = st.tuples(prompts, st.integers(1, 12), st.integers(1, 3))
arrivals = st.lists(st.tuples(st.integers(0, 25), st.booleans(), row), min_size=1, max_size=12)


@given(arrivals, st.integers(8, 30), st.integers(1, 24), st.integers(1, 12), st.sampled_from([0, 3, 40]))
@settings(max_examples=60, deadline=None)
def test_tokens_do_not_depend_on_interactive_sequences_beside_them(
    rows: list[tuple[int, bool, tuple[list[int], int, int]]],
    blocks: int,
    tokens_per_pass: int,
    max_sequences: int,
    parked: int,
) -> None:
    engine = make_engine(blocks, PassLimits(tokens_per_pass, max_sequences), parked, windowed=4)
    coming, samples, passes = sorted(rows, key=lambda each: each[0]), [], 0
    limit = 200 + 50 * sum((len(prompt) + count) * number for _, _, (prompt, count, number) in rows)
    while coming or engine.busy:
        while coming and coming[0][0] <= passes:
            _, interactive, (prompt, count, number) = coming.pop(0)
            first, *forks = [Sequence(prompt, SequenceSampling(count), urgent=interactive) for _ in range(number)]
            first.forks = forks
            samples.append(([first, *forks], prompt, count))
            engine.add(first)
        if engine.busy:
            engine.step()
        passes += 1
        kinds = [sequence.urgent for sequence in engine.scheduler.running]
        assert kinds == sorted(kinds, reverse=True)
        assert passes < limit, "the schedule does not end"
    for sequences, prompt, count in samples:
        for sequence in sequences:
            assert sequence.output_ids == alone(prompt, count)


def tokens_of(batch: Batch, interactive: bool) -> int:
    return sum(chunk.count for chunk in batch.chunks if chunk.sequence.urgent == interactive)


def test_interactive_sequences_take_the_next_pass_and_at_most_half_of_it() -> None:
    """The cache, the slots and the tokens of every pass are taken when they come."""
    engine = make_engine(40, PassLimits(16, 8))
    rows = [Sequence([1 + index, 2, 3], SequenceSampling(60)) for index in range(20)]
    for sequence in rows:
        engine.add(sequence)
    for _ in range(4):
        engine.step()
    assert len(engine.scheduler.running) == 8
    chats = [Sequence([40, index] * 2, SequenceSampling(5), urgent=True) for index in range(2)]
    long = Sequence([41] * 30, SequenceSampling(5), urgent=True)
    for chat in (*chats, long):
        engine.add(chat)
    engine.step()
    assert [len(chat.output_ids) for chat in chats] == [1, 1], "the next pass has their first tokens"
    for _ in range(40):
        engine.step()
        batch = engine.model.batches[-1]
        assert tokens_of(batch, interactive=True) <= 8
        assert any(not chunk.sequence.urgent for chunk in batch.chunks)
    assert all(chat.finished for chat in (*chats, long))
    assert long.output_ids == alone([41] * 30, 5)
    for sequence in engine.run():
        assert sequence.output_ids == alone(sequence.prompt_ids, 60)
    assert all(sequence.finished for sequence in rows)


def test_without_a_batch_interactive_sequences_have_every_slot() -> None:
    engine = make_engine(60, PassLimits(16, 8))
    for index in range(8):
        engine.add(Sequence([index, 1], SequenceSampling(3), urgent=True))
    engine.step()
    assert len(engine.model.batches[-1].sampling) == 8


def test_one_that_is_dropped_leaves_its_blocks_to_others() -> None:
    engine = make_engine(30, PassLimits(16, 4))
    kept, *dropped = [Sequence([index, 1, 2], SequenceSampling(9), urgent=index > 0) for index in range(6)]
    for sequence in (kept, *dropped):
        engine.add(sequence)
    engine.step()
    engine.scheduler.abort(lambda sequence: sequence in dropped)
    assert (engine.scheduler.running, list(engine.scheduler.urgent)) == ([kept], [])
    assert [sequence.output_ids for sequence in engine.run()] == [alone([0, 1, 2], 9)]
    assert all(group.allocator.num_available == group.allocator.num_blocks for group in engine.scheduler.cache.groups)
