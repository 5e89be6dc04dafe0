"""What jobs saw of a store's routing is kept beside its weights (`runtime/weights/streaming.py`), and nothing that lies
there can do harm.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moedge.offload.store.store import Store
from moedge.offload.store.stores import remove
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.loading.prepare import prepare
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import budget_range, make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.source.model_source import open_source
from moedge.runtime.weights import streaming
from moedge.runtime.weights.streaming import FILE, Profile, keep, kept, profile_shapes

SHAPES = profile_shapes([0, 4, 4])


def seen(tokens: float) -> Profile:
    return {name: torch.full(shape, tokens, dtype=torch.float64) for name, shape in SHAPES.items()}


def test_layers_without_experts_have_no_counts() -> None:
    assert SHAPES == {
        "layers.1.chosen": (4,), "layers.1.tokens": (1,), "layers.2.chosen": (4,), "layers.2.tokens": (1,)
    }  # fmt: skip


def test_the_job_that_ends_last_is_believed(tmp_path: Path) -> None:
    for tokens in (3.0, 5.0):
        keep(tmp_path, seen(tokens))
    assert {float(tensor.mean()) for tensor in kept(tmp_path, SHAPES).values()} == {5.0}
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("damage", ["torn", "version", "shape", "negative", "nan"])
def test_a_profile_that_cannot_be_right_counts_for_nothing(damage: str, tmp_path: Path) -> None:
    keep(tmp_path, seen(3.0))
    path, tensors = tmp_path / FILE, seen(3.0)
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:-7])
    elif damage == "version":
        save_file(tensors, path, {"version": "0"})
    else:
        wrong = {"shape": torch.ones(5), "negative": -torch.ones(4), "nan": torch.full((4,), float("nan"))}[damage]
        save_file(tensors | {"layers.1.chosen": wrong}, path, {"version": "1"})
    assert kept(tmp_path, SHAPES) == {}
    keep(tmp_path, seen(2.0))
    assert float(kept(tmp_path, SHAPES)["layers.1.tokens"]) == 2.0


def test_a_job_adds_what_its_rows_chose_and_the_next_one_starts_with_it(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from moedge.cli.models import show

    settings, job = (
        Settings(dtype="fp32", quant="none", kv="fp32", tokens_per_pass=32, max_sequences=1, deterministic=True),
        Workload(1, 20),
    )
    store = tmp_path / "store"
    with open_source(str(checkpoint("qwen3_moe"))) as source:
        prepare(source, store, "none", "fp32", Budgets().on_cpu())
        (store / FILE).unlink(missing_ok=True)
        plan = make_plan(source.shape, settings, MemoryBudget(budget_range(source.shape, settings, job)[0]), job)
        for run in (1, 2):
            with closing(load_engine(source, plan, store)) as loaded:
                popularity = loaded.streamed.experts.stats.layers[0]
                assert popularity.tokens == 15.0 * (run - 1)
                loaded.engine.add(Sequence(list(range(5, 15)), SequenceSampling(6, ignore_eos=True)))
                list(loaded.engine.run())
                assert popularity.tokens == 15.0 * run
        monkeypatch.setattr(streaming, "MAX_TOKENS", 10.0)
        with closing(load_engine(source, plan, store)) as loaded:
            assert loaded.streamed.experts.stats.layers[0].tokens == 10.0, "old jobs fade"
        (store / FILE).unlink()
        keep(store, {name: counts * 3.0 for name, counts in loaded.streamed.experts.counts.items()})
    show(str(store))
    assert "of 30 tokens" in " ".join(capsys.readouterr().out.split())
    Store.open(store).close()
    remove(store)
    assert not store.exists()
