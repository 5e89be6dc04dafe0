"""Schedules end, waste no pass, never preempt the oldest, and never show in the tokens."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moedge.runtime.batch import Batch
from moedge.runtime.engine import Engine
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import KVPool
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.sampling.params import SamplingParams
from moedge.runtime.sampling.sampler import Sampler
from moedge.runtime.scheduler import PassLimits, Scheduler
from moedge.runtime.sequence import Sequence
from moedge.runtime.shape.model_shape import KVGroup

VOCAB, BLOCK = 50, 4


def next_token(token_ids: list[int]) -> int:
    return hashlib.blake2b(bytes(token_ids)).digest()[0] % VOCAB


class FakeModel:
    """Its next token is a hash of all tokens before; it checks that every one of them was computed exactly once."""

    def __init__(self) -> None:
        self.stored: dict[Sequence, list[int]] = {}
        self.batches: list[Batch] = []

    def forward(self, batch: Batch) -> torch.Tensor:
        self.batches.append(batch)
        logits = []
        for chunk in batch.chunks:
            stored = self.stored.setdefault(chunk.sequence, [])
            del stored[chunk.past :]
            assert len(stored) == chunk.past, "a token before the chunk was never computed"
            stored += batch.token_ids[0, chunk.begin : chunk.end].tolist()
            assert batch.positions[0, chunk.begin : chunk.end].tolist() == list(
                range(chunk.past, chunk.past + chunk.count)
            )
            if chunk.samples:
                row = torch.zeros(VOCAB)
                row[next_token(stored)] = 1.0
                logits.append(row)
        return torch.stack(logits) if logits else torch.zeros(0, VOCAB)


def make_engine(blocks: int, limits: PassLimits) -> Engine:
    cache = KVCache([KVPool(KVSpec(KVGroup((0,), 1, 2, None), "fp32", BLOCK), blocks)], blocks)
    return Engine(FakeModel(), Scheduler(limits, cache), Sampler())


def alone(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


jobs = st.lists(
    st.tuples(st.lists(st.integers(0, 49), min_size=1, max_size=20), st.integers(1, 12)), min_size=1, max_size=12
)


@given(jobs, st.integers(8, 30), st.integers(1, 24), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_tokens_do_not_depend_on_the_schedule(
    rows: list[tuple[list[int], int]], blocks: int, tokens_per_pass: int, max_sequences: int
) -> None:
    engine = make_engine(blocks, PassLimits(tokens_per_pass, max_sequences))
    sequences = [Sequence(prompt, SamplingParams(count)) for prompt, count in rows]
    for sequence in sequences:
        engine.add(sequence)
    limit = 50 * sum(len(prompt) + count for prompt, count in rows)
    while engine.busy:
        oldest = (engine.scheduler.running or [None])[0]
        engine.step()
        assert oldest is None or oldest.finished or oldest in engine.scheduler.running, "the oldest was preempted"
        limit -= 1
        assert limit > 0, "the schedule does not end"
    for sequence, (prompt, count) in zip(sequences, rows, strict=True):
        assert sequence.output_ids == alone(prompt, count)
        assert sequence.finish_reason == "length"
    assert engine.scheduler.cache.allocators[0].num_used == 0
    for batch in engine.model.batches:
        assert 0 < batch.num_tokens <= tokens_per_pass
        assert len(batch.chunks) <= max_sequences


def test_a_small_pool_preempts_and_an_ample_one_does_not() -> None:
    """The counter that makes the law above mean something."""
    preemptions = []
    for blocks in (7, 100):
        engine = make_engine(blocks, PassLimits(64, 8))
        for start in range(6):
            engine.add(Sequence([start] * 3, SamplingParams(20)))
        list(engine.run())
        preemptions.append(engine.scheduler.num_preemptions)
    assert preemptions[0] > 0
    assert preemptions[1] == 0


def test_decoding_sequences_and_prompts_share_passes() -> None:
    engine = make_engine(100, PassLimits(16, 8))
    engine.add(Sequence([1] * 4, SamplingParams(10)))
    engine.step()
    engine.add(Sequence([2] * 40, SamplingParams(2)))
    engine.step()
    batch = engine.model.batches[-1]
    assert [chunk.count for chunk in batch.chunks] == [1, 15]
    assert [chunk.samples for chunk in batch.chunks] == [True, False]


def test_a_sequence_that_never_fits_is_refused() -> None:
    engine = make_engine(2, PassLimits(16, 8))
    with pytest.raises(ValueError, match="never fit"):
        engine.add(Sequence([1] * 4, SamplingParams(5)))
    engine.add(Sequence([1] * 4, SamplingParams(4)))


def test_eos_stop_ids_and_ignore_eos_end_or_do_not_end() -> None:
    prompt = [3, 1, 4]
    out = alone(prompt, 12)
    for params, eos, wanted, reason in (
        (SamplingParams(12), {out[3]}, out[: out.index(out[3]) + 1], "stop"),
        (SamplingParams(12, ignore_eos=True), {out[3]}, out, "length"),
        (SamplingParams(12, stop_token_ids=(out[5],)), set(), out[: out.index(out[5]) + 1], "stop"),
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
    engine.model = Broken()
    sequences = [Sequence([start], SamplingParams(6)) for start in (8, 9, 10)]
    for sequence in sequences:
        engine.add(sequence)
    list(engine.run())
    assert [sequence.finish_reason for sequence in sequences] == ["length", "error", "length"]
    assert len(sequences[1].output_ids) == 2
    assert sequences[0].output_ids == alone([8], 6)
