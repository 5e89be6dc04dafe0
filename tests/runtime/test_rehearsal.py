"""The rehearsed pass (`runtime/jobs/lifecycle.py`) is the worst one: its tokens reach the experts; overflows end it."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import closing
from dataclasses import replace
from importlib.resources import files
from itertools import islice, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moedge.moe.routing_stats import RoutingStats
from moedge.moe.streaming_mode import Mode
from moedge.runtime.engine.sequence import Batch, Sequence
from moedge.runtime.jobs import lifecycle
from moedge.runtime.jobs.lifecycle import profile_model, prompt_tokens, rehearse
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.loading.prepare import prepare
from moedge.runtime.model.runner import ModelRunner
from moedge.runtime.plan.memory_ledger import MemoryLedger, TierLedger
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import budget_range, make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.errors import DoesNotFit, SettingError
from moedge.runtime.settings.settings import MIB, Budgets, MemoryBudget, Settings
from moedge.runtime.source.model_source import open_source
from moedge.runtime.weights.key_offsets import fixed_token_ids
from support.tiny_families import SETTINGS, build_model, build_tokenizer, save_tiny

AMPLE = 1 << 36


def rehearsed(folder: Path, tokens: Iterator[int] | None = None, **changed: Any) -> Any:
    """What a rehearsal on the processor left; `tokens` are those of a job where not given."""
    settings = Settings(**{"dtype": "fp32", "quant": "none", "tokens_per_pass": 64, "max_sequences": 4, **changed})
    job = Workload(4, 40)
    with open_source(str(folder)) as source:
        plan = make_plan(source.shape, settings, MemoryBudget(AMPLE), job)
        ids = prompt_tokens(fixed_token_ids(source.folder), source.shape.vocab) if tokens is None else tokens
        with closing(load_engine(source, plan)) as loaded:
            rehearse(loaded, plan, job, ids)
            return loaded


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Shares of their experts that layers of passes wanted, largest passes first."""
    shares: list[tuple[int, float]] = []

    def observe(self: RoutingStats, layer: int, tokens: int, counts: Items[int]) -> None:
        shares.append((-tokens, sum(count > 0 for count in counts) / len(counts)))

    monkeypatch.setattr(RoutingStats, "count", observe)
    return shares  # type: ignore[return-value]


@pytest.mark.parametrize("model", ["demo", "qwen3_moe"])
def test_rehearsed_tokens_reach_most_experts(model: str, wanted: list[Any], checkpoint: Callable[[str], Path]) -> None:
    folder = Path(str(files("moedge.demo") / "model")) if model == "demo" else checkpoint(model)
    rehearsed(folder)
    shares = [share for tokens, share in wanted if tokens == -64]
    assert shares
    assert min(shares) >= 0.85
    wanted.clear()
    # Negative control: one token over and over, as it was, is routed alike wherever it stands.
    rehearsed(folder, repeat(0))
    shares = [share for tokens, share in wanted if tokens == -64]
    assert max(shares) < 0.75


def test_a_pass_has_all_the_rows_of_logits_that_drafted_tokens_may_have(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even at the beginning of a job, when nothing repeats itself."""
    most: list[int] = []
    forward = ModelRunner.forward

    def observed(self: ModelRunner, batch: Batch) -> torch.Tensor:
        most.append(len(batch.logit_rows))
        return forward(self, batch)

    monkeypatch.setattr(ModelRunner, "forward", observed)
    settings, job = Settings(dtype="fp32", quant="none", tokens_per_pass=64, max_sequences=4), Workload(4, 40)
    with open_source(str(checkpoint("qwen3_moe"))) as source:
        plan = replace(make_plan(source.shape, settings, MemoryBudget(AMPLE), job), free_tokens=(7, 15, 29))
        with closing(load_engine(source, plan)) as loaded:
            rehearse(loaded, plan, job, prompt_tokens([7, 8], source.shape.vocab))
            scheduler = loaded.engine.scheduler
            assert scheduler.limits.free_tokens == plan.free_tokens
            assert not scheduler.busy
            assert all(group.allocator.num_live == 0 for group in scheduler.cache.groups)
    assert max(most) == 29


def test_the_text_comes_first_then_ids_of_the_whole_vocabulary() -> None:
    ids = list(islice(prompt_tokens([7, 8], 300), 4000))
    assert ids[:2] == [7, 8]
    assert set(ids) == set(range(300))
    assert ids == list(islice(prompt_tokens([7, 8], 300), 4000))


def test_nothing_of_a_rehearsal_counts_and_sharing_is_as_before(checkpoint: Callable[[str], Path]) -> None:
    loaded = rehearsed(checkpoint("llama"))
    assert loaded.engine.metrics.passes == 0
    assert loaded.engine.scheduler.cache.sharing


def test_what_a_rehearsal_reads_does_not_count(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    settings, job = Settings(dtype="fp32", quant="none", tokens_per_pass=64, max_sequences=4), Workload(4, 40)
    with open_source(str(checkpoint("qwen3_moe"))) as source:
        smallest, _ = budget_range(source.shape, settings, job)
        plan = make_plan(source.shape, settings, MemoryBudget(smallest), job)
        assert plan.streams
        prepare(source, tmp_path / "store", "none", "fp32", Budgets(disk="1GiB").on_cpu())
        with closing(load_engine(source, plan, tmp_path / "store")) as loaded:
            rehearse(loaded, plan, job, prompt_tokens([], 128))
            assert loaded.streamed.nbytes_from_disk == 0


def profiled(peak: int, budget: int, tier: str = "host") -> int | None:
    """How many bytes more may hold experts after a rehearsal with this peak; None where nothing was said."""
    found: list[int] = []
    tiers = {name: TierLedger(name, budget, peak=peak) for name in (tier, "host")}
    engine = SimpleNamespace(ledger=MemoryLedger(tiers), streamed=SimpleNamespace(hold_more=found.append))
    plan = SimpleNamespace(encoder_nbytes=20 * MIB)
    shape, tokenizer = SimpleNamespace(vocab=8), SimpleNamespace(encode=lambda text: [1])
    loaded: Any = SimpleNamespace(
        engine=engine, policy=SimpleNamespace(plan=plan), tokenizer=tokenizer, source=SimpleNamespace(shape=shape)
    )
    profile_model(loaded, Workload(1, 8))
    return found[0] if found else None


def test_experts_get_what_the_largest_pass_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less what a prompt takes while it is encoded, and 64 MiB or 4 % of the budget; nothing beyond the budget."""
    monkeypatch.setattr(lifecycle, "rehearse", lambda *_: None)
    monkeypatch.setattr(MemoryLedger, "measure", lambda ledger: ledger)
    assert profiled(1200 * MIB, 1500 * MIB) == (1500 - 1200 - 20 - 64) * MIB
    assert profiled(1200 * MIB, 5000 * MIB) == (5000 - 1200 - 20 - 200) * MIB
    assert profiled(1450 * MIB, 1500 * MIB) == 0
    assert profiled(10 * MIB, 1500 * MIB, "device") is None
    with pytest.raises(DoesNotFit):
        profiled(1501 * MIB, 1500 * MIB)


def test_tokens_are_the_same_with_more_experts_held_and_fewer_bytes_are_read(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    settings, job = Settings(dtype="fp32", quant="none", tokens_per_pass=64, max_sequences=4), Workload(4, 40)
    with open_source(str(checkpoint("qwen3_moe"))) as source:
        smallest, _ = budget_range(source.shape, settings, job)
        plan = make_plan(source.shape, settings, MemoryBudget(smallest), job)
        prepare(source, tmp_path / "store", "none", "fp32", Budgets(disk="1GiB").on_cpu())
        results = []
        for more in (0, 1000):
            with closing(load_engine(source, plan, tmp_path / "store", stream=Mode.ALL)) as loaded:
                held = loaded.streamed.experts.num_held
                size = loaded.streamed.memory.nbytes(loaded.streamed.memory.experts[0])
                loaded.streamed.hold_more(more * size)
                for first in range(4):
                    loaded.engine.add(Sequence([first + 1, 7, 9], SequenceSampling(12, ignore_eos=True)))
                tokens = [sequence.output_ids for sequence in loaded.engine.run()]
                results.append((tokens, loaded.streamed.nbytes_from_disk, loaded.streamed.experts.num_held - held))
    assert results[0][0] == results[1][0]
    assert results[0][1] > results[1][1]
    assert results[0][2] == 0 < results[1][2]


def overflowing(folder: Path) -> Path:
    """A model whose hidden states leave float16's range, though each of its weights is within it."""
    model = build_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight *= 1e3
            layer.mlp.down_proj.weight *= 1e4
    model.save_pretrained(folder)
    build_tokenizer(folder, model.config.vocab_size)
    return folder


def test_numbers_that_overflow_in_fp16_end_the_rehearsal_and_say_what_to_do(
    tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    folder = overflowing(tmp_path)
    with pytest.raises(SettingError, match=r"4 rehearsed rows .* overflow in fp16.* --dtype bf16 or --dtype fp32"):
        rehearsed(folder, dtype="fp16")
    # Negative controls: the same model where there is room for its numbers, and another one in fp16.
    rehearsed(folder, dtype="bf16")
    rehearsed(checkpoint("llama"), dtype="fp16")


# In a process of its own, whose peak is that of the pass.
MEASURE = """
import gc
import sys

gc.disable()
from pathlib import Path
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.jobs.lifecycle import prompt_tokens, rehearse
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.settings.settings import MemoryBudget
from moedge.runtime.settings.settings import Settings
from moedge.runtime.source.model_source import open_source

def status(name):
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

job = Workload(8, 132)
settings = Settings(dtype="fp32", quant="none", kv="fp32", tokens_per_pass=1024, max_sequences=8)
with open_source(sys.argv[1]) as source:
    plan = make_plan(source.shape, settings, MemoryBudget(1 << 36), job)
    loaded = load_engine(source, plan)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    rehearse(loaded, plan, job, prompt_tokens([5], source.shape.vocab))
    print(status("VmHWM") - before, plan.scratch_nbytes)
"""


def test_a_plan_counts_the_inputs_that_layers_have_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of Gemma 4, all layers together, are wider than anything else of a pass: here 7 times 2,048 numbers."""
    sizes = {**SETTINGS["gemma4_text"], "hidden_size_per_layer_input": 2048, "num_hidden_layers": 7}
    monkeypatch.setitem(SETTINGS, "gemma4_text", sizes)
    save_tiny("gemma4_text", tmp_path)
    ran = subprocess.run([sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, check=True)
    took, planned = map(int, ran.stdout.split())
    assert took > 7 * 2048 * 1024 * 4
    assert took <= planned
