"""Models with recurrent layers (`runtime/model/recurrent/`, `runtime/kv/states.py`): however prompts are cut, whoever
else is in a pass, tokens are transformers'.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moedge.runtime.engine.engine import Engine
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.kv.spec import SCAN_CHUNK
from moedge.runtime.loading.engine_loader import LoadedEngine, load_engine
from moedge.runtime.model.runner import ModelRunner
from moedge.runtime.model.weights_seam import PackedLinear
from moedge.runtime.plan.memory_ledger import STATES
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.sampling.sampler import Sampler
from moedge.runtime.settings.errors import SettingError
from moedge.runtime.settings.settings import MemoryBudget, Settings
from moedge.runtime.shape.read import RECURRENT
from moedge.runtime.source.model_source import open_source
from support.family_run import LENGTHS, NEW_TOKENS, prompts

TWICE = [*prompts(), *([384 - token for token in ids] for ids in prompts())]


@dataclass(frozen=True)
class Way:
    """How twelve rows run; `blocks` is the size of the cache of keys and values, None for ample."""

    tokens_per_pass: int = 1024
    max_sequences: int = 16
    blocks: int | None = None
    deterministic: bool = True


WHOLE = Way()
WAYS = {
    "whole prompts": WHOLE,
    "chunks of 16, 3 of 12": Way(16, 3),
    "preempted": Way(48, 8, blocks=30),
    "not deterministic": Way(deterministic=False),
    "not deterministic, chunks of 16, 3 of 12": Way(16, 3, deterministic=False),
    "not deterministic, preempted": Way(48, 8, blocks=30, deterministic=False),
}

# Both arithmetics, cut prompts and preempting.
FEW = ("chunks of 16, 3 of 12", "not deterministic, preempted")


def load(folder: Path, way: Way, **settings: Any) -> LoadedEngine:
    chosen: dict[str, Any] = {"dtype": "fp32", "quant": "none", "kv": "fp32", "deterministic": way.deterministic}
    limits = {"tokens_per_pass": way.tokens_per_pass, "max_sequences": way.max_sequences}
    job = Workload(len(TWICE), max(LENGTHS) + NEW_TOKENS)
    with open_source(str(folder)) as source:
        plan = make_plan(source.shape, Settings(**{**chosen, **limits, **settings}), MemoryBudget(8 << 30), job)
        if way.blocks is not None:
            plan = replace(plan, kv_blocks=(way.blocks,) * len(plan.kv_blocks), kv_block=4)
        return load_engine(source, plan)


def sequences_of(rows: list[list[int]]) -> list[Sequence]:
    return [Sequence(ids, SequenceSampling(NEW_TOKENS), frozenset({2})) for ids in rows]


def run(engine: Engine, sequences: list[Sequence]) -> list[list[int]]:
    for sequence in sequences:
        engine.add(sequence)
    list(engine.run())
    return [sequence.output_ids for sequence in sequences]


def check_happened(loaded: LoadedEngine, way: Way, layers: int) -> None:
    """What the way is meant to vary did happen, by its counters; `layers` counts functions, two of most layers."""
    scheduler, states, passes = loaded.engine.scheduler, loaded.model.states, loaded.engine.metrics.passes
    assert states is not None
    assert scheduler.cache.states is not None
    running = min(way.max_sequences, len(TWICE))
    assert scheduler.cache.states.num_free == scheduler.cache.states.num_slots == running + -(-running // 8)
    assert (scheduler.counts.preemptions > 0) == (way.blocks is not None)
    assert (scheduler.counts.recomputed_tokens > 0) == (way.blocks is not None)
    cut = states.num_scans > layers * (len(TWICE) + scheduler.counts.preemptions)
    assert cut == (way.tokens_per_pass < 1024 or way.deterministic)
    if way.deterministic:
        assert states.num_steps == states.num_stepped
    else:
        # All sequences of a pass in one call; what a preempted one steps over again comes on top where it must step.
        again = scheduler.counts.recomputed_tokens if states.stepwise else 0
        assert states.num_steps <= layers * (passes + again)
        assert states.num_stepped > 1.5 * states.num_steps


@pytest.mark.sample("few ways-lfm2")
@pytest.mark.parametrize("family", sorted(RECURRENT))
@pytest.mark.parametrize("ways", [FEW, tuple(WAYS)], ids=["few ways", "all ways"])
def test_tokens_are_those_of_transformers(
    ways: tuple[str, ...], family: str, checkpoint: Callable[[str], Path], stock: Callable[[Path], Any]
) -> None:
    folder, found = checkpoint(family), {}
    for name in ways:
        way = WAYS[name]
        with closing(load(folder, way)) as loaded:
            found[name] = run(loaded.engine, sequences_of(TWICE))
            groups = loaded.model.states.pool.spec.groups  # type: ignore[union-attr]
            functions = sum(len(each.layers) * (bool(each.conv) + bool(each.recurrent)) for each in groups)
            check_happened(loaded, way, functions)
            arena = loaded.ledger.computing.arenas[STATES]
            assert arena.planned == arena.actual > 0
    model = stock(folder)
    wanted = [
        model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)[0, len(ids) :]
        for ids in TWICE
    ]
    assert len({token for row in wanted for token in row.tolist()}) > 20, "equal tokens show nothing"
    for name, tokens in found.items():
        assert tokens == [row.tolist() for row in wanted], name


def logits_of(folder: Path, way: Way, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], torch.Tensor]:
    """By row and number of generated tokens."""
    found: dict[tuple[int, int], torch.Tensor] = {}
    forward, sequences = ModelRunner.forward, sequences_of(prompts())

    def kept(self: ModelRunner, batch: Any) -> torch.Tensor:
        logits = forward(self, batch)
        for row, sequence in zip(logits, batch.sampling, strict=True):
            found[sequences.index(sequence), len(sequence.output_ids)] = row.clone()
        return logits

    with monkeypatch.context() as patch, closing(load(folder, way)) as loaded:
        patch.setattr(ModelRunner, "forward", kept)
        run(loaded.engine, sequences)
    return found


@pytest.mark.numerics
@pytest.mark.sample("lfm2")
@pytest.mark.parametrize(
    "family",
    ["qwen3_next", "granitemoehybrid", "jamba", "lfm2", "falcon_h1", "kimi_linear", "minimax", "qwen4_exp_text"],
)
def test_where_prompts_are_cut_shows_in_no_bit(
    family: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = logits_of(checkpoint(family), WHOLE, monkeypatch)
    for way in (Way(16, 3), Way(37, 5), Way(50, 2), Way(48, 8, blocks=30)):
        cut = logits_of(checkpoint(family), way, monkeypatch)
        assert cut.keys() == whole.keys()
        assert all(torch.equal(cut[key], whole[key]) for key in whole), way


def test_a_prompt_is_cut_at_multiples_only(checkpoint: Callable[[str], Path]) -> None:
    with closing(load(checkpoint("lfm2"), Way(21, 3))) as loaded:
        ends: list[tuple[int, int]] = []
        schedule = loaded.engine.scheduler.schedule

        def watched() -> Any:
            batch = schedule()
            ends.extend((chunk.past + chunk.count, len(chunk.sequence.prompt_ids)) for chunk in batch.chunks)
            return batch

        loaded.engine.scheduler.schedule = watched  # type: ignore[method-assign]
        run(loaded.engine, sequences_of(TWICE))
    inside = [end for end, prompt in ends if end < prompt]
    assert inside
    assert all(end % SCAN_CHUNK == 0 for end in inside)


def test_fewer_tokens_a_pass_than_a_cut_are_refused(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(SettingError, match="tokens-per-pass 8 is too few, give at least 16"):
        load(checkpoint("lfm2"), Way(8, 2))
    load(checkpoint("lfm2"), Way(8, 2, deterministic=False)).close()


@pytest.mark.sample("qwen3_next")
@pytest.mark.parametrize(
    "family", ["qwen3_next", "kimi_linear", "bailing_hybrid", "minimax", "lfm3", "qwen4_exp_text", "zamba2"]
)
def test_samples_of_a_prompt_go_on_from_copies_of_its_state(family: str, checkpoint: Callable[[str], Path]) -> None:
    rows = prompts()[1:3]

    def samples(forked: bool) -> list[list[int]]:
        with closing(load(checkpoint(family), WHOLE)) as loaded:
            params = [SequenceSampling(NEW_TOKENS, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(3)]
            found = [[Sequence(ids, each) for each in params] for ids in rows]
            for first, *others in found:
                first.forks = others if forked else []
                for sequence in [first] if forked else [first, *others]:
                    loaded.engine.add(sequence)
            list(loaded.engine.run())
            hits = loaded.engine.scheduler.counts.prefix_hit_tokens
            # Rows of the same pass share what can be cut, of which the last token is none.
            whole = sum((len(ids) - 1) // SCAN_CHUNK * SCAN_CHUNK for ids in rows)
            assert hits == 2 * (sum(map(len, rows)) if forked else whole) > 0
        return [sequence.output_ids for sequences in found for sequence in sequences]

    assert samples(True) == samples(False)


def test_a_pass_that_runs_out_of_memory_starts_its_sequences_again(checkpoint: Callable[[str], Path]) -> None:
    """Its first layers have changed states already: repeated in halves, as other models do, tokens would be wrong."""
    with closing(load(checkpoint("qwen3_next"), Way(64, 8))) as loaded:
        wanted = run(loaded.engine, sequences_of(TWICE))
    with closing(load(checkpoint("qwen3_next"), Way(64, 8))) as loaded:
        loaded.engine.split_retry.fall_back = lambda cause, tokens: None
        forward, calls = PackedLinear.forward, []

        def failing(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(calls) in (200, 1500):
                raise torch.OutOfMemoryError("as told")
            return forward(self, x)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PackedLinear, "forward", failing)
            assert run(loaded.engine, sequences_of(TWICE)) == wanted
        assert loaded.engine.scheduler.counts.preemptions >= 2


def test_projections_are_read_once_a_pass(checkpoint: Callable[[str], Path]) -> None:
    with closing(load(checkpoint("qwen3_next"), Way(deterministic=False))) as loaded:
        modules = dict(loaded.model.model.named_modules())
        projections = {module for name, module in modules.items() if "linear_attn" in name}
        calls = 0
        forward = PackedLinear.forward

        def counting(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += self in projections
            return forward(self, x)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PackedLinear, "forward", counting)
            run(loaded.engine, sequences_of(TWICE))
        assert calls == loaded.engine.metrics.passes * 3 * 3, "three projections in each of three layers"


def test_quantized_keys_have_offsets_in_layers_that_attend(checkpoint: Callable[[str], Path]) -> None:
    with closing(load(checkpoint("qwen3_next"), WHOLE, kv="int8")) as loaded:
        assert loaded.key_offsets is not None
        assert list(loaded.key_offsets.layers) == [3]
        assert loaded.engine.scheduler.cache.pools[0].quantized
        assert all(run(loaded.engine, sequences_of(TWICE)))


INSTRUCTION = torch.randint(5, 380, (37,), generator=torch.Generator().manual_seed(8)).tolist()


def shared_rows() -> list[list[int]]:
    """Eight rows with a common instruction, of which two pairs have more in common."""
    own = prompts()
    return [[*INSTRUCTION, *own[i], *tail] for i in (0, 2, 3, 5) for tail in ([7], [9, 11, 13])]


SHARING = (Way(16, 3), Way(48, 8, deterministic=False), WHOLE, Way(48, 4, blocks=60))


@pytest.mark.sample("two ways-qwen3_next")
@pytest.mark.parametrize("family", sorted(RECURRENT))
@pytest.mark.parametrize("ways", [SHARING[:2], SHARING], ids=["two ways", "all ways"])
def test_a_prefix_goes_on_from_the_state_that_was_kept(
    ways: tuple[Way, ...], family: str, checkpoint: Callable[[str], Path], stock: Callable[[Path], Any]
) -> None:
    folder, model = checkpoint(family), stock(checkpoint(family))
    wanted = [
        model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)[0, len(ids) :]
        for ids in shared_rows()
    ]
    for way in ways:
        with closing(load(folder, way)) as loaded:
            found = run(loaded.engine, sequences_of(shared_rows()))
            scheduler = loaded.engine.scheduler
            assert found == [row.tolist() for row in wanted], way
            kept = len(INSTRUCTION) // SCAN_CHUNK * SCAN_CHUNK
            assert scheduler.counts.prefix_hit_tokens >= 5 * kept, way
            assert scheduler.cache.states is not None
            assert scheduler.cache.states.allocator.num_cached > 0
            assert scheduler.cache.states.num_free == scheduler.cache.states.num_slots


def test_snapshots_of_a_pass_that_failed_are_not_found(checkpoint: Callable[[str], Path]) -> None:
    with closing(load(checkpoint("qwen3_next"), Way(64, 8))) as loaded:
        wanted = run(loaded.engine, sequences_of(shared_rows()))
    with closing(load(checkpoint("qwen3_next"), Way(64, 8))) as loaded:
        loaded.engine.split_retry.fall_back = lambda cause, tokens: None
        forward, calls = PackedLinear.forward, []

        def failing(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(calls) == 10:
                raise torch.OutOfMemoryError("as planned")
            return forward(self, x)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PackedLinear, "forward", failing)
            assert run(loaded.engine, sequences_of(shared_rows())) == wanted
        assert loaded.engine.scheduler.counts.preemptions >= 1


STATES_OF = {"fp32": "fp32", "int8": "bf16", "int8/int4": "bf16", "int4": "int8"}


def stepped_logprobs(folder: Path, kv: str, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Log-probabilities [t, V] after a prompt, and after each token that its sequence is made to step over."""
    token_ids = torch.randint(5, 380, (160,), generator=torch.Generator().manual_seed(2)).tolist()
    with closing(load(folder, Way(deterministic=False), kv=kv)) as loaded:
        if loaded.model.states is not None:
            assert loaded.model.states.pool is not None
            assert loaded.model.states.pool.spec.format == STATES_OF[kv]
        rows: list[torch.Tensor] = []
        sample, forward = Sampler.sample, loaded.model.forward

        def kept(batch: Any) -> torch.Tensor:
            logits = forward(batch)
            rows.append(logits.log_softmax(-1)[0])
            return logits

        def forced(self: Sampler, *rest: Any) -> Any:
            return replace(sample(self, *rest), token_ids=np.array([token_ids[40 + len(rows) - 1]]))

        loaded.model.forward = kept  # type: ignore[method-assign]
        monkeypatch.setattr(Sampler, "sample", forced)
        loaded.engine.add(Sequence(token_ids[:40], SequenceSampling(len(token_ids) - 40, ignore_eos=True)))
        list(loaded.engine.run())
        monkeypatch.undo()
        assert loaded.model.states is None or loaded.model.states.num_stepped > 100
    return torch.stack(rows)


def divergence(folder: Path, kv: str, monkeypatch: pytest.MonkeyPatch) -> float:
    """The mean KL divergence, in nats per token, from the predictions with keys, values and states in float32."""
    p, q = (stepped_logprobs(folder, each, monkeypatch) for each in ("fp32", kv))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_states_beside_quantized_keys_lose_at_most_twice_what_those_do_alone(
    kv: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = divergence(checkpoint("llama"), kv, monkeypatch)
    for family in ("qwen3_next", "granitemoehybrid", "jamba"):
        found = divergence(checkpoint(family), kv, monkeypatch)
        assert 0 < found <= 2 * plain, family
