"""Decoder layers by the library's steps: which ones, whether their logits are those of the seams, and when they run."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from moedge.quant.matmul import row_layouts
from moedge.quant.matmul.matmul import GEMV_MAX_ROWS
from moedge.quant.matmul.row_layouts import reads_floats
from moedge.quant.native import library
from moedge.runtime.calibration.pass_rates import streaming
from moedge.runtime.engine.sequence import Batch, Sequence
from moedge.runtime.loading import engine_loader
from moedge.runtime.loading.engine_loader import LoadedEngine, load_engine
from moedge.runtime.loading.prepare import prepare
from moedge.runtime.model.fused import selftest
from moedge.runtime.model.fused.decoder import FusedExecutor
from moedge.runtime.model.fused.layer import buffers_nbytes
from moedge.runtime.model.runner import ModelRunner, SeamExecutor
from moedge.runtime.plan.memory_ledger import FUSED
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.source.model_source import open_source
from support.seeded_bugs import BUGS, Bug, planted

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.skipif(not library.available(), reason="the library of CPU kernels is not usable here"),
]

# Sides that are multiples of what the kernels read at a time.
SIZES = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
INT4 = Settings(dtype="bf16", quant="int4", kv="bf16")
Folder = Callable[..., Path]


@contextmanager
def engine(folder: Path, settings: Settings = INT4) -> Iterator[LoadedEngine]:
    with open_source(str(folder)) as source:
        plan = make_plan(source.shape, settings, MemoryBudget(4 << 30), Workload(8, 128))
        with closing(load_engine(source, plan)) as loaded:
            yield loaded


@pytest.fixture(autouse=True)
def _tiled_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measured time decides from how many rows on layers are not fused."""
    monkeypatch.setattr(engine_loader, "measure_gemv_max_rows", lambda *_: GEMV_MAX_ROWS)


def by_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "available", lambda: False)


def logits_of(loaded: LoadedEngine, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The logits of passes of short prompts, of a long one, and of generated tokens, which are the same tokens whatever
    the logits are."""
    found, forward = [], ModelRunner.forward

    def forced(self: ModelRunner, batch: Batch) -> torch.Tensor:
        logits = forward(self, batch)
        found.append(logits.clone())
        chosen = torch.tensor([7 + len(sequence.output_ids) for sequence in batch.sampling])
        return torch.nn.functional.one_hot(chosen, logits.shape[1]).float()

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "forward", forced)
        for lengths in ((3, 20, 7), (2, 110)):
            for length in lengths:
                prompt = [(11 * each + length) % 380 for each in range(length)]
                loaded.engine.add(Sequence(prompt, SequenceSampling(12, ignore_eos=True)))
            list(loaded.engine.run())
    return found


# Dense layers: as in Llama, with biases of q, k and v, with norms of heads, with GELU and norms that add one.
DENSE = ("llama", "qwen2", "qwen3", "gemma")


# Floats are read by the kernels of AVX2 alone.
FLOATS = ["none"] if reads_floats() else []


@pytest.mark.sample("qwen3_moe-mxfp4", "qwen3_moe-none", "qwen2-nf4", "qwen3-int4", "gemma-int4", "gemma-none")
@pytest.mark.parametrize(
    ("family", "quant"),
    [*product(["qwen3_moe"], ["int4", "nf4", "mxfp4", *FLOATS]), *product(DENSE, ["int4", "nf4", *FLOATS])],
)
def test_fused_layers_are_as_near_to_float32_as_the_seams(
    family: str, quant: str, checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = SIZES if family == "qwen3_moe" else SIZES | {"head_dim": 32}
    folder, settings = checkpoint(family, **sizes), replace(INT4, quant=quant)
    with engine(folder, settings) as loaded:
        executor = loaded.model.executor
        assert len(loaded.fused) == len(loaded.model.layers)
        assert isinstance(executor, FusedExecutor)
        layers, together = loaded.fused[0].taken, executor.decoder.taken
        fused = logits_of(loaded, monkeypatch)
        assert (loaded.fused[0].taken - layers, executor.decoder.taken - together) == (24, 23), (
            "a long prompt is computed layer by layer"
        )
    by_seams(monkeypatch)
    with engine(folder, settings) as loaded:
        assert loaded.fused == []
        assert isinstance(loaded.model.executor, SeamExecutor)
        seams = logits_of(loaded, monkeypatch)
    with engine(folder, replace(settings, dtype="fp32", kv="fp32")) as loaded:
        meant = logits_of(loaded, monkeypatch)
    rounding = distance(seams, meant)
    assert distance(fused, meant) < 1.1 * rounding
    # Floats have no rounding but that of activations, which both have on their own.
    assert distance(fused, seams) < (1.5 if quant == "none" else 0.3) * rounding


def distance(found: list[torch.Tensor], meant: list[torch.Tensor]) -> float:
    """Of the logits of most rows: another expert, where two are equally good, changes a row."""
    each = [
        (one.double() - other).norm(dim=1) / other.double().norm(dim=1) for one, other in zip(found, meant, strict=True)
    ]
    return float(torch.cat(each).median())


# SmolLM2's sizes, with Gemma 4's for experts: what 128 does not divide.
SMOLLM2 = {
    "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "num_hidden_layers": 2,
}  # fmt: skip
PUBLISHED_SIZES = {
    "qwen3_moe": SMOLLM2 | {"moe_intermediate_size": 704, "intermediate_size": 704},
    "llama": SMOLLM2 | {"intermediate_size": 1536},
}


@pytest.mark.sample("float-int8-qwen3_moe", "float-int8-llama", "float-none-llama")
@pytest.mark.parametrize("family", PUBLISHED_SIZES)
@pytest.mark.parametrize(
    ("compute", "quant"),
    [*product(["float"], ["int8", "int4", "nf4", "mxfp4", *FLOATS]), *product(["int8"], ["int8", "int4", "mxfp4"])],
)
def test_models_in_published_sizes_are_near_to_float32(
    compute: str, quant: str, family: str, checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever computes them. Rounding changes experts of tiny random models; logits without relation are 1.4 apart."""
    folder, settings = checkpoint(family, **PUBLISHED_SIZES[family]), replace(INT4, quant=quant, compute=compute)
    with engine(folder, settings) as loaded:
        assert len(loaded.fused) == len(loaded.model.layers)
        found = logits_of(loaded, monkeypatch)
    with engine(folder, replace(settings, dtype="fp32", kv="fp32", compute="float")) as loaded:
        meant = logits_of(loaded, monkeypatch)
    assert distance(found, meant) < 0.7


@pytest.mark.parametrize("held", [0, 3])
@pytest.mark.parametrize(("quant", "kv"), [("int4", "bf16"), ("int4", "int8"), *product(FLOATS, ["bf16"])])
def test_layers_whose_experts_stream_have_the_bits_of_those_that_hold_them(
    quant: str, kv: str, held: int, checkpoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In passes of prompts and of tokens; loading's self-tests read no expert."""
    folder, settings = checkpoint("qwen3_moe", **SIZES | {"num_experts": 7}), replace(INT4, kv=kv, quant=quant)
    with engine(folder, settings) as loaded:
        wanted, offsets = logits_of(loaded, monkeypatch), loaded.key_offsets
    with open_source(str(folder)) as source:
        plan = make_plan(source.shape, settings, MemoryBudget(4 << 30), Workload(8, 128))
        prepare(source, tmp_path / "store", plan.quant, plan.dtype, Budgets(disk="256MiB").on_cpu())
        plan = streaming(source.shape, plan)
        plan = replace(plan, placement=replace(plan.placement, held_experts=(held,) * len(source.shape.layers)))
        with closing(load_engine(source, plan, tmp_path / "store", key_offsets=offsets)) as loaded:
            assert [layer.streams for layer in loaded.fused] == [True] * len(source.shape.layers)
            assert isinstance(loaded.model.executor, FusedExecutor) == (kv == "bf16")
            assert loaded.streamed.nbytes_moved == 0
            taken = loaded.fused[0].taken
            found = logits_of(loaded, monkeypatch)
            assert loaded.fused[0].taken == taken + len(found)
            cache = loaded.streamed.experts.cache
            assert cache is not None
            assert cache.counts.wanted == cache.counts.hits + cache.counts.fetched - cache.counts.unwanted > 0
    assert all(map(torch.equal, found, wanted))


def test_layers_are_fused_in_passes_of_fewer_tokens_than_the_self_test(checkpoint: Folder) -> None:
    """The self-test at load computes more rows than any pass will, and the plan has memory for them."""
    with engine(checkpoint("qwen3_moe", **SIZES), replace(INT4, tokens_per_pass=4, max_sequences=1)) as loaded:
        assert len(loaded.fused) == len(loaded.model.layers)
        assert buffers_nbytes(loaded.fused) <= loaded.ledger.tiers["host"].arenas[FUSED].planned


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_quantized_caches_are_read_between_two_calls(kv: str, checkpoint: Folder) -> None:
    with engine(checkpoint("qwen3_moe", **SIZES), replace(INT4, kv=kv)) as loaded:
        assert len(loaded.fused) == len(loaded.model.layers)
        assert isinstance(loaded.model.executor, SeamExecutor)


@pytest.mark.parametrize("changed", [{"deterministic": True}, {"dtype": "fp32", "kv": "fp32"}, {"quant": "none"}])
def test_other_settings_keep_the_seams(
    changed: dict[str, object], checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_layouts, "reads_floats", lambda: False)
    with engine(checkpoint("qwen3_moe", **SIZES), replace(INT4, **changed)) as loaded:  # type: ignore[arg-type]
        assert loaded.fused == []


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "glm4_moe_lite", "phimoe"])
def test_layers_of_another_structure_keep_the_seams(family: str, checkpoint: Folder) -> None:
    with engine(checkpoint(family, **SIZES)) as loaded:
        assert loaded.fused == []


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_a_layer_that_disagrees_in_the_self_test_keeps_the_seams(
    family: str, checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The structure is that of another model, and one thing that it computes is not."""
    parts_of = selftest.parts_of

    def wrong(layer: torch.nn.Module) -> object:
        parts = parts_of(layer)
        if parts is None or parts.mixture is None:
            return parts and replace(parts, norms=(parts.norms[0], parts.norms[1]._replace(plus_one=True)))
        return replace(parts, mixture=replace(parts.mixture, softmax_chosen=not parts.mixture.softmax_chosen))

    monkeypatch.setattr(selftest, "parts_of", wrong)
    with engine(checkpoint(family, **SIZES)) as loaded:
        assert loaded.fused == []
        assert isinstance(loaded.model.executor, SeamExecutor)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug", [bug for bug in BUGS.values() if bug.file.endswith("steps.cpp")], ids=lambda bug: bug.name
)
def test_a_planted_bug_of_the_steps_keeps_the_seams(
    bug: Bug, checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven experts (FlexOlmo) and 192 columns, which no block of the steps divides, and passes of many rows."""
    sizes = SIZES | {"hidden_size": 192, "num_attention_heads": 6, "num_experts": 7}
    if bug.found_by == "gates":
        # Gemma 4's inner width, which the steps' pieces do not divide.
        folder = checkpoint("llama", **sizes | {"intermediate_size": 704})
    else:
        folder = checkpoint("qwen3_moe", **sizes)
    settings = replace(INT4, tokens_per_pass=512)
    with engine(folder, settings) as loaded:
        assert len(loaded.fused) == len(loaded.model.layers)
    with planted(bug), engine(folder, settings) as loaded:
        assert loaded.fused == []


def test_results_of_many_threads_are_those_of_one(checkpoint: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with engine(checkpoint("qwen3_moe", **SIZES)) as loaded:
                found.append(logits_of(loaded, monkeypatch)[:12])
        finally:
            torch.set_num_threads(before)
    assert all(map(torch.equal, *found))
