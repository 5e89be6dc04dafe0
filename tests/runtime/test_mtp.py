"""The MTP head of a checkpoint (`runtime/model/mtp.py`, `runtime/engine/predictor.py`): what it drafts is its
definition's, and never shows in what is generated.

Heads of tiny models are random and hardly ever right. So what sequences draft is often replaced by what is known to
come: drafts are accepted, rejected and cut in every way, and the head sees tokens of all these passes.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from moedge.moe.streaming_mode import Mode
from moedge.offload.errors import MoedgeError
from moedge.offload.machine.profile import Overheads
from moedge.runtime.engine import predictor as predictor_module
from moedge.runtime.engine.engine import Engine
from moedge.runtime.engine.lookup import Lookup
from moedge.runtime.engine.predictor import MOST_PREDICTED, HeadDrafts, Predictor
from moedge.runtime.engine.scheduler import PassLimits, Scheduler
from moedge.runtime.engine.sequence import Batch, Sequence
from moedge.runtime.jobs.lifecycle import prompt_tokens, rehearse
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import KVPool
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.loading.prepare import prepare
from moedge.runtime.model.mtp import MtpHead
from moedge.runtime.model.weights_seam import ArrivingLayers
from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import PlanRequest, budget_range, solve
from moedge.runtime.plan.rates import Rates
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.sampling.sampler import Sampler
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.shape.model_shape import KVGroup
from moedge.runtime.shape.mtp import MTP
from moedge.runtime.source.model_source import ModelSource, open_source
from moedge.runtime.text.tokenizer import Tokenizer
from moedge.runtime.weights.key_offsets import keep, kept, measure
from support.speculation import FREE, LONGEST, WAYS, Way, everyone, plan_for, rows, run
from support.tiny_mtp import LAYERS, Reference, save_mtp
from support.trained_mtp import text, train

WITH_HEAD = Settings(speculate="mtp")
# Room for every draft.
AMPLE = (256,) * 4


@pytest.fixture(scope="session")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`headed(family)` is the folder of a tiny checkpoint with a head."""
    return cache(lambda family: save_mtp(family, tmp_path_factory.mktemp(f"mtp-{family}")))


class Knowing(HeadDrafts):
    """Drafts as many tokens as the head did; three in four are what follows in `wanted`, the others the head's."""

    __slots__ = ("random", "start", "wanted")

    def __init__(self, predictor: Predictor, sequence: Sequence, wanted: list[int], seed: int) -> None:
        super().__init__(predictor)
        self.start, self.wanted, self.random = len(sequence.prompt_ids), wanted, Random(seed)

    def extend(self, token_ids: Iterable[int]) -> None:
        Lookup.extend(self, token_ids)

    def draft(self, most: int) -> list[int]:
        known = self.wanted[len(self) - self.start :]
        pairs = zip(self.ids[:most], [*known, *self.ids[len(known) :]], strict=False)
        return [theirs if self.random.randrange(4) else own for own, theirs in pairs]


def deep(engine: Engine) -> None:
    """Lets the head draft as many tokens as it may, whatever becomes of them."""
    assert engine.predictor is not None
    engine.predictor.depth = MOST_PREDICTED
    engine.predictor.judge = lambda drafted, accepted: None  # type: ignore[method-assign]


def knowing(sequences: list[Sequence], answers: list[list[int]]) -> Callable[[Engine], None]:
    def begun(engine: Engine) -> None:
        deep(engine)
        for seed, (sequence, wanted) in enumerate(zip(sequences, answers, strict=True)):
            assert engine.predictor is not None
            sequence.lookup = Knowing(engine.predictor, sequence, wanted, seed)

    return begun


Stores = tuple[Path | None, Path | None]


def prepared(source: ModelSource, way: Way, folder: Path) -> Stores:
    """Stores without and with the head, for ways that stream."""
    if not way.smallest:
        return None, None
    stores = folder / "without", folder / "with"
    for store, each in zip(stores, (source, source.speculating(WITH_HEAD)), strict=True):
        prepare(each, store, "none", "fp32", Budgets().on_cpu())
    return stores


@pytest.mark.sample("plain-glm4_moe")
@pytest.mark.parametrize("family", MTP)
@pytest.mark.parametrize("way", ["plain", "small passes", "tight", "tight, parked", "smallest budget", "halves"])
def test_the_head_drafts_what_its_definition_gives(
    way: str, family: str, headed: Callable[[str], Path], tmp_path: Path
) -> None:
    """All drafts behind all passes, of sequences that found stored blocks, were preempted, accepted drafts or not."""
    sequences, reference = [each for each in rows([]) if not each.forks], Reference.read(headed(family))
    compared = Counter[int]()

    def compare(engine: Engine) -> None:
        for each in engine.scheduler.running:
            assert isinstance(each.lookup, HeadDrafts)
            if drafted := each.lookup.ids:
                logits = reference.drafts(each.tokens(0, each.num_tokens), len(drafted))
                assert logits.argmax(-1).tolist() == drafted, (each.params, len(each.output_ids))
                compared[len(drafted)] += 1

    with open_source(str(headed(family))) as source:
        plain, stores = [each for each in rows([]) if not each.forks], prepared(source, WAYS[way], tmp_path)
        run(source, WAYS[way], plain, (), stores[0])
        answers = [each.output_ids for each in plain]
        begun = knowing(sequences, answers)
        engine = run(source.speculating(WITH_HEAD), WAYS[way], sequences, AMPLE, stores[1], begun, compare)
    assert [each.output_ids for each in sequences] == answers
    assert engine.metrics.accepted_tokens > 20
    assert compared[MOST_PREDICTED] > 20


def trial(source: ModelSource, way: Way, stores: Stores = (None, None)) -> Engine:
    """Compares all of a run with the head to one without: every kind of sampling, samples of one prompt, stops."""
    first = rows([])
    run(source, way, first, (), stores[0])
    answers = [each.output_ids for each in first[:2]]
    plain, drafting = rows(answers), rows(answers)
    pairs = list(zip(everyone(drafting), everyone(plain), strict=True))
    without = run(source, way, plain, (), stores[0])
    begun = knowing([ours for ours, _ in pairs], [theirs.output_ids for _, theirs in pairs])
    engine = run(source.speculating(WITH_HEAD), way, drafting, FREE, stores[1], begun)
    for ours, theirs in pairs:
        assert ours.output_ids == theirs.output_ids, ours.params
        assert (ours.finish_reason, ours.error) == (theirs.finish_reason, theirs.error)
        if way.deterministic:
            assert ours.logprobs == theirs.logprobs
            assert ours.prompt_logprobs == theirs.prompt_logprobs
    counts = engine.metrics
    assert counts.generated_tokens == without.metrics.generated_tokens
    assert 0 < counts.accepted_tokens < counts.drafted_tokens
    assert counts.passes < without.metrics.passes
    return engine


@pytest.mark.sample("plain-glm4_moe")
@pytest.mark.parametrize("family", MTP)
@pytest.mark.parametrize("way", WAYS)
def test_its_drafts_show_in_no_bit(way: str, family: str, headed: Callable[[str], Path], tmp_path: Path) -> None:
    with open_source(str(headed(family))) as source:
        trial(source, WAYS[way], prepared(source, WAYS[way], tmp_path))


@pytest.mark.sample("glm4_moe-fp32")
@pytest.mark.parametrize("kv", ["fp32", "int8"])
@pytest.mark.parametrize("family", MTP)
def test_nor_in_tokens_by_default(family: str, kv: str, headed: Callable[[str], Path]) -> None:
    with open_source(str(headed(family))) as source:
        trial(source, Way(kv=kv, deterministic=False))


VOCAB = 6


class Markov:
    """A model whose distribution of a token depends on the one before it, and a head that knows the likeliest."""

    def __init__(self) -> None:
        self.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))
        self.hidden = torch.empty(0)

    def __call__(self, batch: Batch) -> torch.Tensor:
        self.hidden = torch.zeros(batch.num_tokens, 1)
        return self.table[batch.token_ids[0, batch.logit_rows]]

    def forward(self, batch: Batch, hidden: torch.Tensor, again: bool) -> tuple[torch.Tensor, torch.Tensor]:
        assert hidden.shape == (batch.num_tokens, 1)
        return self.table[batch.token_ids[0, batch.logit_rows]].argmax(-1), hidden[batch.logit_rows]


class MarkovModel:
    def __init__(self, head: Markov) -> None:
        self.forward = head


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_the_distribution_of_sampled_tokens_is_the_model_s(temperature: float) -> None:
    """Chi-square of the tokens behind each token where the head drafts the likeliest, up to three."""
    head, pool = Markov(), KVPool(KVSpec(KVGroup((0,), 1, 2, None), "fp32", 16), 400)
    scheduler = Scheduler(PassLimits(512, 64, free_tokens=(400,) * 7), KVCache([pool]))
    engine = Engine(MarkovModel(head), scheduler, Sampler(), predictor=Predictor(head, scheduler, 100))
    params = [SequenceSampling(12, temperature=temperature, seed=seed) for seed in range(1500)]
    sequences = [Sequence([1, 2, 3, 1, 2], each) for each in params]
    for sequence in sequences:
        engine.add(sequence)
    list(engine.run())
    assert 2000 < engine.metrics.accepted_tokens < 0.8 * engine.metrics.drafted_tokens
    pairs = Counter(pair for each in sequences for pair in pairwise([each.prompt_ids[-1], *each.output_ids]))
    assert pairs.total() == 12 * len(sequences)
    expected = (head.table / temperature).softmax(-1)
    for before in range(VOCAB):
        count = sum(pairs[before, after] for after in range(VOCAB))
        wanted = [count * float(expected[before, after]) for after in range(VOCAB)]
        statistic = sum((pairs[before, after] - each) ** 2 / each for after, each in enumerate(wanted))
        # The 99.9 % quantile with five degrees of freedom.
        assert statistic < 20.5, before


def test_depth_is_what_is_accepted_often_enough() -> None:
    def depth(accepted: list[int], layers: int = 40, drafted: int = 1) -> int:
        predictor = Predictor(Markov(), None, layers)  # type: ignore[arg-type]
        for each in accepted:
            predictor.judge(drafted, each)
        return predictor.depth

    assert depth([0] * 127) == depth([1] * 127) == 1
    # A head of forty layers takes a fortieth of the time; twice that is wanted of the last token.
    assert depth([1, 0] * 64) == 3
    assert depth([1, 0, 0] * 50) == 2
    assert depth([1, 0, 0, 0, 0] * 30) == 1
    assert depth(([1] + [0] * 31) * 4) == depth([0] * 128) == 0
    # Of two layers a head takes half a pass.
    assert depth([1, 0] * 64, layers=2) == 1
    assert depth([1, 0, 0] * 50, layers=2) == 0
    assert depth([1, 1, 1, 1, 0] * 30, layers=2) == 3
    # Tokens behind the first that was wrong were not tried.
    assert depth([2, 0] * 64, layers=2, drafted=3) == 1
    assert depth([3, 3, 2] * 64, layers=2, drafted=3) == 3
    # It stays off, and follows what came last.
    assert depth([0] * 128 + [1] * 1000) == 0
    assert depth([1] * 200 + [0] * 2000) == 0


def test_a_head_that_is_never_right_is_not_computed_any_more(
    headed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictor_module, "_TRIED", 16)
    sequences = [each for each in rows([]) if not each.forks]
    drafted: list[int] = []
    with open_source(str(headed("glm4_moe"))) as source:
        way = replace(WAYS["plain"], deterministic=False)
        engine = run(
            source.speculating(WITH_HEAD), way, sequences, AMPLE, None,
            passed=lambda engine: drafted.append(engine.metrics.drafted_tokens),
        )  # fmt: skip
    assert engine.predictor is not None
    assert engine.predictor.depth == 0
    assert engine.predictor.ended == "the checkpoint's own head drafts no more: 0% of its tokens were accepted"
    assert drafted[0] < drafted[-2] == drafted[-1]
    assert not any(isinstance(each.lookup, HeadDrafts) for each in sequences)


def test_offsets_of_quantized_keys_are_the_model_s_alone(headed: Callable[[str], Path], tmp_path: Path) -> None:
    """A job that began with the head goes on without it, and the other way round: its offsets fit both."""
    with open_source(str(headed("glm4_moe"))) as source:
        found = []
        for one in (source, source.speculating(WITH_HEAD)):
            plan = plan_for(one, Way(kv="int8"))
            with closing(load_engine(one, plan, key_offsets=found[0] if found else None)) as loaded:
                assert loaded.key_offsets is not None
                offsets = measure(loaded.model, [7, 8, 9] * 5)
                found.append(offsets)
                (group,) = one.shape.kv_groups
                assert len(offsets.of(group)) == len(one.shape.layers)
        keep(tmp_path, found[0])
        assert kept(tmp_path, one.shape).digest == kept(tmp_path, source.shape).digest  # type: ignore[union-attr]
    without, ours = found
    assert without.digest == ours.digest
    assert sorted(ours.layers) == list(range(LAYERS))


@pytest.mark.sample("glm4_moe-3")
@pytest.mark.parametrize("end_after", [1, 3, 6])
@pytest.mark.parametrize("family", MTP)
def test_nothing_is_read_for_a_head_that_has_ended(
    family: str, end_after: int, headed: Callable[[str], Path], tmp_path: Path
) -> None:
    """Where all dense layers and experts stream, passes behind its end bring those of the model's layers alone."""
    found = [0]
    with open_source(str(headed(family))) as plain:
        source, (_, store) = plain.speculating(WITH_HEAD), prepared(plain, Way(smallest=True), tmp_path)
        assert store is not None
        plan = replace(plan_for(source, WAYS["smallest budget"]), free_tokens=AMPLE, undrafted="")
        with closing(load_engine(source, plan, store, stream=Mode.ALL)) as loaded:
            engine, memory = loaded.engine, loaded.streamed.memory
            engine.add(Sequence([7, 8, 9] * 6, SequenceSampling(14, temperature=1.0, seed=1, ignore_eos=True)))
            while engine.busy:
                if len(found) > end_after:
                    engine.predictor.end("told to")
                engine.step()
                found.append(loaded.streamed.nbytes_from_disk)
            whole = sum(memory.nbytes(key) for key in memory.streamed)
            head = sum(memory.nbytes(key) for key in memory.streamed if key.layer == LAYERS)
    passes = [after - before for before, after in pairwise(found)]
    assert len(passes) > end_after + 4
    # In the first one a pass begins to bring what the head of the pass before would have had.
    assert passes[1:end_after] == [whole] * (end_after - 1)
    assert set(passes[end_after + 1 :]) == {whole - head}


@pytest.mark.slow
def test_a_plan_that_streams_runs_the_head_and_rehearses_it(tmp_path: Path) -> None:
    """Dense layers from a slow disk: the plan of a job says how many tokens are free, and the head drafts so many."""
    save_mtp("glm4_moe", tmp_path / "model", first_k_dense_replace=9)
    nothing = Overheads(1e-12, 1e-12, 1e-12, 1e-15, 1e-12, 1e-15)
    rates = Rates(1e5, 1e10, 1e15, nothing, {"none": {1: 1e9}}, measured=True)
    job, found = Workload(8, LONGEST), []
    with open_source(str(tmp_path / "model")) as source:
        for speculate in ("off", "mtp"):
            settings = Settings(dtype="fp32", quant="none", kv="fp32", deterministic=True, speculate=speculate)
            one, store = source.speculating(settings), tmp_path / speculate
            budget = MemoryBudget(budget_range(one.shape, settings, job)[0])
            costs = CostModel(one.shape, rates)
            plan = solve(PlanRequest(costs=costs, workload=job, budget=budget, settings=settings)).plan
            prepare(one, store, "none", "fp32", Budgets().on_cpu())
            with closing(load_engine(one, plan, store)) as loaded:
                rehearse(loaded, plan, job, prompt_tokens([7, 8, 9], one.shape.vocab))
                sequences = [each for each in rows([]) if not each.forks]
                for each in sequences:
                    loaded.engine.add(each)
                list(loaded.engine.run())
                found.append(([each.output_ids for each in sequences], loaded.engine.metrics, plan))
    (plain, without, _), (ours, counts, plan) = found
    assert ours == plain
    assert without.drafted_tokens == 0 < counts.drafted_tokens
    assert plan.free_tokens[-1] > plan.max_sequences
    assert any("own head" in note for note in plan.notes)


@pytest.mark.slow
def test_a_useless_head_costs_less_than_3_percent_of_the_bytes(tmp_path: Path) -> None:
    """In a model of as many layers as GLM-4.5-Air, all of whose experts stream; few passes compute it."""
    save_mtp("glm4_moe", tmp_path / "model", layers=46)
    found: list[tuple[int, Engine]] = []
    with open_source(str(tmp_path / "model")) as source:
        way = Way(smallest=True, deterministic=False)
        for one, store in zip((source, source.speculating(WITH_HEAD)), prepared(source, way, tmp_path), strict=True):
            assert store is not None
            plan, (group,) = plan_for(one, way), one.shape.kv_groups
            blocks = (17 * KVSpec(group, "fp32", plan.kv_block).blocks_for(50),)
            plan = replace(plan, max_sequences=16, kv_blocks=blocks, free_tokens=AMPLE, undrafted="")
            with closing(load_engine(one, plan, store, stream=Mode.ALL)) as loaded:
                engine = loaded.engine
                for seed in range(16):
                    engine.add(
                        Sequence([seed + 5] * 20, SequenceSampling(30, temperature=1.0, seed=seed, ignore_eos=True))
                    )
                if engine.predictor is None:
                    engine.scheduler.limits = replace(engine.scheduler.limits, free_tokens=())
                list(engine.run())
                found.append((loaded.streamed.nbytes_from_disk, engine))
    (before, without), (after, engine) = found
    assert engine.predictor is not None
    assert engine.predictor.depth == 0
    assert engine.metrics.passes == without.metrics.passes
    print(f"{after / before:.3f} times the bytes")
    assert 1 < after / before < 1.03


@pytest.mark.slow
def test_a_trained_head_is_right_more_than_once_a_pass(tmp_path: Path) -> None:
    """Of greedy rows; the tokens of sampled ones are the same, too. With all weights held, and with hardly any."""
    train(tmp_path / "model")
    with open_source(str(tmp_path / "model")) as source, Tokenizer.load(source.folder) as tokenizer:
        ids, sources = tokenizer.encode(text()), (source, source.speculating(WITH_HEAD))
        stores = prepared(source, Way(smallest=True), tmp_path)

        def answers(head: bool, way: Way, temperature: float) -> tuple[list[list[int]], Engine]:
            params = [SequenceSampling(48, temperature=temperature, seed=seed, ignore_eos=True) for seed in range(16)]
            sequences = [Sequence(ids[24 * seed :][:20], each) for seed, each in enumerate(params)]
            engine = run(sources[head], way, sequences, AMPLE if head else (), stores[head])
            return [each.output_ids for each in sequences], engine

        for way in (Way(deterministic=False), Way(smallest=True)):
            for temperature in (0.0, 0.7):
                (plain, without), (drafting, engine) = (answers(head, way, temperature) for head in (False, True))
                assert drafting == plain
                counts = engine.metrics
                each = counts.generated_tokens / (counts.generated_tokens - counts.accepted_tokens)
                print(f"{way.smallest=} {temperature=}: {each:.2f} tokens of a sequence and pass, of 1")
                assert each > (1.2 if temperature else 2.0)
                assert counts.passes < (0.9 if temperature else 0.6) * without.metrics.passes


@pytest.mark.parametrize("fails_at", [1, 4, 5])
def test_memory_that_gives_out_in_the_head_ends_its_drafts(
    fails_at: int, headed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its first call behind a pass, and in a further one, for which tables had grown."""
    calls = 0

    def forward(head: MtpHead, *args: Any, forward: Any = MtpHead.forward) -> Any:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise torch.OutOfMemoryError("no memory for the head")
        return forward(head, *args)

    plain, ours = rows([]), rows([])
    with open_source(str(headed("glm4_moe"))) as source:
        run(source, WAYS["plain"], plain, (), None)
        monkeypatch.setattr(MtpHead, "forward", forward)
        engine = run(source.speculating(WITH_HEAD), WAYS["plain"], ours, AMPLE, None, deep)
    assert calls == fails_at
    assert [each.output_ids for each in everyone(ours)] == [each.output_ids for each in everyone(plain)]
    assert engine.predictor is not None
    assert engine.predictor.ended.endswith("out of memory (no memory for the head)")


@pytest.mark.parametrize("lacks", ["family", "number", "tensor", "store", "shape"])
def test_what_has_no_head_is_refused(
    lacks: str, headed: Callable[[str], Path], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    import json

    from safetensors.torch import load_file, save_file

    folder = checkpoint("qwen3_moe", num_hidden_layers=2)
    wanted = "a qwen3_moe"
    if lacks != "family":
        folder = tmp_path / "model"
        save_mtp("glm4_moe", folder)
        config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        name = f"model.layers.{LAYERS}.eh_proj.weight"
        if lacks == "number":
            config["num_nextn_predict_layers"], wanted = 0, "num_nextn_predict_layers 0"
            tensors = {each: one for each, one in tensors.items() if f"layers.{LAYERS}." not in each}
        elif lacks == "tensor":
            del tensors[name]
            wanted = f"layer {LAYERS} of the files has no eh_proj.weight"
        elif lacks == "shape":
            tensors[name], wanted = tensors[name][:, :-1].contiguous(), r"eh_proj is \[64, 127\], wanted \[64, 128\]"
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if lacks == "store":
        with open_source(str(folder)) as source:
            prepare(source, tmp_path / "store", "none", "fp32", Budgets().on_cpu())
        folder, wanted = tmp_path / "store", "was prepared without an MTP head"
    with open_source(str(folder)) as source, pytest.raises(MoedgeError, match=wanted):
        source.speculating(WITH_HEAD)


def test_the_head_is_a_layer_of_the_plan_and_of_the_store(headed: Callable[[str], Path], tmp_path: Path) -> None:
    """A store with it opens with it, whatever settings say; others do not know it."""
    with open_source(str(headed("glm4_moe"))) as source:
        found = source.speculating(WITH_HEAD)
        assert len(source.shape.layers) == LAYERS
        assert len(found.shape.layers) == LAYERS + 1
        hidden = source.shape.hidden
        own = {each.name: (each.rows, each.cols) for each in found.shape.layers[-1].dense}
        assert own["eh_proj"] == (hidden, 2 * hidden)
        assert {"embed_tokens", "shared_head.head"}.isdisjoint(own)
        assert [group.layers for group in found.shape.kv_groups] == [(0, 1, 2)]
        prepare(found, tmp_path / "store", "int8", "fp32", Budgets().on_cpu())
    with open_source(str(tmp_path / "store")) as stored:
        assert stored.shape == found.shape
        assert stored.speculating(WITH_HEAD) is stored


def keep_unnormed(head: MtpHead, norm: Any, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
    head.hidden = args[0].squeeze(0)


def one_row(chunks: Any, seen: Any = predictor_module._seen) -> Any:
    """Of accepted drafts the head sees the last one alone."""
    begin = 0
    for old, new in seen(chunks):
        count = 1 if new.drafted else new.count
        yield (
            replace(old, begin=old.begin + new.count - count),
            replace(new, begin=begin, past=new.past + new.count - count, count=count, drafted=0),
        )
        begin += count


def a_position_late(sequence: Sequence, row: int, following: Any = predictor_module._next) -> Any:
    found = following(sequence, row)
    return replace(found, past=found.past - 1)


def the_same_tokens(chunk: Any) -> list[int]:
    ids: list[int] = chunk.sequence.tokens(chunk.past, chunk.past + chunk.count)
    return ids + [0] * (chunk.count - len(ids))


def freed_too_early(layers: ArrivingLayers, head: Any = ArrivingLayers.head) -> Any:
    passing = layers._passing
    found = head(layers)
    layers._passing = passing
    return found


BUGS: dict[str, tuple[Any, str, Any]] = {
    "a head that has ended is read on": (MtpHead, "leave", lambda head: None),
    "the head's bytes are given back before its second call": (ArrivingLayers, "head", freed_too_early),
    "the head gets the state before the last norm": (MtpHead, "_keep", keep_unnormed),
    "accepted drafts are not seen": (predictor_module, "_seen", one_row),
    "a second draft is at the position of the first": (predictor_module, "_next", a_position_late),
    "the head gets the token at a position, not the one behind": (predictor_module, "_behind", the_same_tokens),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(
    bug: str, headed: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*BUGS[bug])
    if "ended" in bug:
        with pytest.raises(AssertionError):
            test_nothing_is_read_for_a_head_that_has_ended("glm4_moe", 3, headed, tmp_path)
        return
    way = "smallest budget" if "bytes" in bug else "plain"
    with pytest.raises(AssertionError) as found:
        test_the_head_drafts_what_its_definition_gives(way, "glm4_moe", headed, tmp_path)
    print(bug, "->", str(found.value).splitlines()[0][:100])
