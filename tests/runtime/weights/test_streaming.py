"""Streaming never shows in the tokens: all in memory, half, or next to nothing, and the counters prove which it was."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from moedge.moe.streaming_mode import Mode
from moedge.offload.errors import BadStore
from moedge.offload.store.store import Store
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.loading.engine_loader import LoadedEngine, load_engine
from moedge.runtime.loading.prepare import prepare
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import budget_range, make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.source.model_source import ModelSource, open_source
from moedge.runtime.source.stored_model import row_readers

LENGTHS, NEW_TOKENS = (3, 40, 17), 10
JOB = Workload(len(LENGTHS), max(LENGTHS) + NEW_TOKENS)


def settings(quant: str) -> Settings:
    return Settings(dtype="fp32", quant=quant, kv="fp32", tokens_per_pass=64, max_sequences=3, deterministic=True)


def generate(source: ModelSource, plan: Plan, store: Path | None) -> tuple[list[list[int]], int, int]:
    """(tokens of every sequence, passes, bytes that came from the disk)."""
    with closing(load_engine(source, plan, store, stream=Mode.ALL)) as loaded:
        return tokens(loaded), loaded.engine.metrics.passes, moved(loaded)


def tokens(loaded: LoadedEngine) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, 380, (length,), generator=generator).tolist() for length in LENGTHS]
    sequences = [Sequence(prompt, SequenceSampling(NEW_TOKENS, ignore_eos=True)) for prompt in prompts]
    for sequence in sequences:
        loaded.engine.add(sequence)
    list(loaded.engine.run())
    return [sequence.output_ids for sequence in sequences]


def moved(loaded: LoadedEngine) -> int:
    return loaded.streamed.nbytes_from_disk


@pytest.mark.sample("4 layers-qwen3_moe-nf4")
@pytest.mark.parametrize(
    ("family", "quant"),
    [
        ("qwen3_moe", "none"),
        ("qwen3_moe", "nf4"),
        ("qwen3_moe", "int4"),
        ("gpt_oss", "int8"),
        ("granitemoe", "none"),
        ("llama", "none"),
    ],
)
@pytest.mark.parametrize("sizes", [{"num_hidden_layers": 4}, {}], ids=["4 layers", "all layers"])
def test_tokens_are_the_same_at_every_budget(
    sizes: dict[str, int], family: str, quant: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    with open_source(str(checkpoint(family, **sizes))) as source:
        smallest, whole = budget_range(source.shape, settings(quant), JOB)
        plans = [make_plan(source.shape, settings(quant), MemoryBudget(budget), JOB) for budget in
                 (whole + (1 << 28), (smallest + whole) // 2, smallest)]  # fmt: skip
        prepare(source, tmp_path / "store", quant, "fp32", Budgets().on_cpu())
        wanted, _, nothing = generate(source, plans[0], None)
        assert nothing == 0
        results = [generate(source, plan, tmp_path / "store") for plan in plans]
    assert [tokens for tokens, _, _ in results] == [wanted] * 3
    for plan, (_, passes, nbytes) in zip(plans, results, strict=True):
        assert nbytes == passes * (plan.weights_nbytes - plan.held_nbytes)
    assert results[0][2] == 0 < results[1][2] < results[2][2]


def test_a_wrong_byte_in_a_streamed_expert_shows(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Negative control: the streamed bytes are the ones that are computed with."""
    with open_source(str(checkpoint("qwen3_moe"))) as source:
        smallest, _ = budget_range(source.shape, settings("none"), JOB)
        plan = make_plan(source.shape, settings("none"), MemoryBudget(smallest), JOB)
        prepare(source, tmp_path / "store", "none", "fp32", Budgets().on_cpu())
        wanted, _, _ = generate(source, plan, tmp_path / "store")
        file = tmp_path / "store" / "layer-0001.safetensors"
        data = bytearray(file.read_bytes())
        data[-5000:-1000] = bytes(4000)
        file.write_bytes(data)
        with pytest.raises(Exception, match="layer-0001") as broken:
            generate(source, plan, tmp_path / "store")
    assert type(broken.value).__name__ == "StreamBroken"
    assert wanted


@pytest.mark.parametrize(
    ("family", "stored"),
    [
        pytest.param("qwen3_moe", 1, marks=pytest.mark.slow),
        pytest.param("gpt_oss", 1, marks=pytest.mark.slow),
        pytest.param("llama4_text", 1, marks=pytest.mark.slow),
        pytest.param("granitemoe", 0, marks=pytest.mark.slow),
        pytest.param("gemma3_text", 0, marks=pytest.mark.slow),
        ("gemma4_text", 1),
    ],
)
def test_rows_of_embeddings_are_read_from_the_disk(
    family: str, stored: int, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Those that the output head shares stay in memory; Gemma 4 has a second one, for inputs of layers."""
    with open_source(str(checkpoint(family))) as source:
        smallest, whole = budget_range(source.shape, settings("none"), JOB)
        plans = [make_plan(source.shape, settings("none"), MemoryBudget(each), JOB) for each in (2 * whole, smallest)]
        prepare(source, tmp_path / "store", "none", "fp32", Budgets().on_cpu())
        wanted, _, _ = generate(source, plans[0], tmp_path / "store")
        with closing(load_engine(source, plans[0], tmp_path / "store")) as loaded:
            assert row_readers(loaded.model.model) == []
        with closing(load_engine(source, plans[1], tmp_path / "store")) as loaded:
            assert tokens(loaded) == wanted
            assert len(row_readers(loaded.model.model)) == stored
            # Deterministic passes have padding, too.
            looked_up = sum(LENGTHS) + (NEW_TOKENS - 1) * len(LENGTHS)
            assert loaded.rows.looked_up >= stored * looked_up * source.shape.hidden * 4
            assert bool(stored) == (loaded.rows.nbytes > 0) == (loaded.rows.kept > 0)
            for each in row_readers(loaded.model.model):
                with pytest.raises(IndexError, match="wanted 0 to"):
                    each.read(np.array([0, len(each)]), 2)


def test_an_embedding_that_is_damaged_is_noticed_when_it_is_opened(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    with open_source(str(checkpoint("qwen3_moe"))) as source:
        smallest, _ = budget_range(source.shape, settings("none"), JOB)
        plan = make_plan(source.shape, settings("none"), MemoryBudget(smallest), JOB)
        prepare(source, tmp_path / "store", "none", "fp32", Budgets().on_cpu())
        with Store.open(tmp_path / "store") as store:
            extent = store.resident["model.embed_tokens.weight"].extent
        with extent.path.open("r+b") as file:
            file.seek(extent.offset + extent.nbytes // 2)
            file.write(b"\xff\xff\xff\xff")
        with pytest.raises(BadStore, match="do not match their CRC32"):
            load_engine(source, plan, tmp_path / "store")


def test_a_store_opens_without_its_checkpoint(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(checkpoint("gemma3_text"), tmp_path / "model"))
    with open_source(str(copy)) as source:
        prepare(source, tmp_path / "store", "int8", "fp32", Budgets().on_cpu())
        plan = make_plan(source.shape, settings("int8"), MemoryBudget(1 << 40), JOB)
        wanted, _, _ = generate(source, plan, None)
        shape = source.shape
    shutil.rmtree(copy)
    with open_source(str(tmp_path / "store")) as source:
        assert source.shape == shape
        assert generate(source, plan, source.store)[0] == wanted
        for option in ({"quant": "nf4"}, {"dtype": "bf16"}):
            with pytest.raises(Exception, match="was prepared with"):
                source.settle(Settings(**option))  # type: ignore[arg-type]


def test_budgets_between_smallest_and_whole_all_work_and_never_hold_less(checkpoint: Callable[[str], Path]) -> None:
    from moedge.runtime.settings.errors import DoesNotFit

    with open_source(str(checkpoint("qwen3_moe"))) as source:
        smallest, whole = budget_range(source.shape, settings("none"), JOB)
        with pytest.raises(DoesNotFit, match="the smallest that works"):
            make_plan(source.shape, settings("none"), MemoryBudget(smallest - 1), JOB)
        held = []
        for budget in range(smallest, whole + 1, max(1, (whole - smallest) // 50)):
            plan = make_plan(source.shape, settings("none"), MemoryBudget(budget), JOB)
            weights = plan.held_nbytes + plan.placement.dense_ring + plan.placement.expert_ring
            assert weights + plan.kv_nbytes + plan.scratch_nbytes < budget
            # More sequences together decode with more scratch.
            held.append(plan.kv_nbytes + plan.scratch_nbytes + weights)
        assert held == sorted(held)
