"""Models that look n-grams up in a table on the disk (`runtime/model/recurrent/ngrams.py`, `offload/stream/rows.py`),
and attend to blocks of tokens that an indexer chooses (`runtime/attention/indexed.py`).

However prompts are cut, shared, forked and preempted: test_recurrent_models.py has this family, too.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moedge.offload.errors import BadCheckpoint
from moedge.offload.stream.reader_lane import BUFFER_NBYTES, NUM_THREADS
from moedge.offload.stream.rows import TableReader
from moedge.runtime.attention.indexed import IndexedAttention
from moedge.runtime.attention.protocol import AttentionCall
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.loading.engine_loader import LoadedEngine, load_engine
from moedge.runtime.loading.prepare import prepare, prepare_linked
from moedge.runtime.model.recurrent import ngrams, pass_states
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import budget_range, make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.errors import UnsupportedModel
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.shape.formula import shape_of_config
from moedge.runtime.shape.shards import READING_NBYTES, resident_nbytes, tables_nbytes
from moedge.runtime.source.model_source import ModelSource, open_source
from moedge.runtime.source.stored_model import row_readers
from support.family_run import NEW_TOKENS, prompts
from support.installed_transformers import needs_transformers
from support.tiny_families import save_tiny

pytestmark = needs_transformers("5.24")
FAMILY, END = "qwen4_exp_text", 2
# Rows as long as published ones in bfloat16, of tables of some MiB.
WIDE = {"ple_embed_dim": 700, "ngram_vocab_size_base": 1500}
# Prompts in which texts end, twice in a row, too: n-grams do not reach over an end.
ENDED = [[END], [9, END, 9, 8], [7, END, END, 6, 9], [*range(40, 70), END, *range(50, 55)], *prompts()]
JOB = Workload(len(ENDED), max(map(len, ENDED)) + NEW_TOKENS)


def settings(**others: Any) -> Settings:
    plain = {"dtype": "fp32", "quant": "none", "kv": "fp32", "tokens_per_pass": 64, "max_sequences": 8}
    return Settings(**plain | others)


@contextmanager
def opened(folder: Path) -> Iterator[tuple[ModelSource, list[Plan]]]:
    """A checkpoint, and plans that hold all of its weights or as few as possible."""
    with open_source(str(folder)) as source:
        smallest, whole = budget_range(source.shape, settings(), JOB)
        yield source, [make_plan(source.shape, settings(), MemoryBudget(each), JOB) for each in (2 * whole, smallest)]


def generate(loaded: LoadedEngine, rows: list[list[int]]) -> list[list[int]]:
    sequences = [Sequence(ids, SequenceSampling(NEW_TOKENS, ignore_eos=True)) for ids in rows]
    for sequence in sequences:
        loaded.engine.add(sequence)
    list(loaded.engine.run())
    return [sequence.output_ids for sequence in sequences]


def stock_tokens(model: Any, rows: list[list[int]]) -> list[list[int]]:
    """transformers' own; it goes on behind ends of texts."""
    limits = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "eos_token_id": -1, "pad_token_id": 0}
    found = [model.generate(torch.tensor([ids]), do_sample=False, **limits)[0, len(ids) :].tolist() for ids in rows]
    assert len({token for row in found for token in row}) > 20, "equal tokens show nothing"
    return found


@pytest.fixture(scope="module")
def wanted(stock: Callable[[Path], Any], checkpoint: Callable[..., Path]) -> list[list[int]]:
    return stock_tokens(stock(checkpoint(FAMILY, **WIDE)), ENDED)


@pytest.mark.sample("held", "linked")
# Each of what is stored is in the fast lane once: rows of the checkpoint's own files, and of a store's.
@pytest.mark.parametrize(
    "stored",
    ["", "copied", *(pytest.param(each, marks=pytest.mark.slow) for each in ("linked", "int8"))],
    ids=["held", "copied", "linked", "int8"],
)
def test_rows_of_tables_come_from_files_and_tokens_are_those_of_transformers(
    stored: str, wanted: list[list[int]], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Wherever other weights are; and whatever is read is counted, and what the plan says."""
    store = tmp_path / "store" if stored else None
    with opened(checkpoint(FAMILY, **WIDE)) as (source, plans):
        plan, quant = plans[bool(stored)], "int8" if stored == "int8" else "none"
        if stored == "int8":
            plan = make_plan(source.shape, settings(quant="int8"), plan.budget, JOB)
        if store is not None:
            make = prepare_linked if stored == "linked" else prepare
            assert make(source, store, quant, "fp32", Budgets().on_cpu()) is not None
        with closing(load_engine(source, plan, store)) as loaded:
            # The smallest plan computes one sequence at a time.
            some = slice(2, 4) if stored else slice(None)
            tokens = generate(loaded, ENDED[some])
            counts, passed = loaded.rows, loaded.engine.metrics.pass_tokens
            assert isinstance(loaded.model.attention, IndexedAttention)
            assert loaded.model.attention.chooser.num_chosen > 0
            assert (loaded.streamed.nbytes_from_disk > 0) == bool(stored)
            assert len(row_readers(loaded.model.model)) == 2 + bool(stored)
    assert plan.tables_nbytes == tables_nbytes(source.shape) == (15_491 + 16_114) * 280
    assert plan.token_rows_nbytes == 2 * 10 * 280 + bool(stored) * 64 * 4
    assert counts.looked_up == passed * plan.token_rows_nbytes
    assert 0 < counts.reads <= counts.rows - counts.kept
    assert (tokens == wanted[some]) == (stored != "int8")


def test_what_threads_read_through_is_what_plans_count() -> None:
    assert NUM_THREADS * 2 * BUFFER_NBYTES <= READING_NBYTES


def test_a_table_is_no_memory_of_a_plan(checkpoint: Callable[..., Path]) -> None:
    """Nor of one that only has config.json."""
    wide, narrow = (ModelConfig.read(checkpoint(FAMILY, **sizes)) for sizes in (WIDE, WIDE | {"ple_embed_dim": 350}))
    for config in (wide, narrow):
        config.values["ngram_vocab_size_base"] = 1_000_003
    shapes = [shape_of_config(each, "float32", _shapes(each)) for each in (wide, narrow)]
    assert tables_nbytes(shapes[0]) == 2 * tables_nbytes(shapes[1]) > 5 << 30
    assert shapes[0].parameters - shapes[0].active_parameters > tables_nbytes(shapes[0]) // 4
    assert resident_nbytes(shapes[0], "fp32") == resident_nbytes(shapes[1], "fp32") < 100 << 20


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    from moedge.runtime.model.definition import stock_tensor_shapes

    return stock_tensor_shapes(config)


def broken_tokens(folder: Path) -> list[list[int]]:
    with open_source(str(folder)) as source:
        plan = make_plan(source.shape, settings(), MemoryBudget(4 << 30), JOB)
        # Two sequences at a time, which give way to one another.
        plan = replace(plan, kv_blocks=(30,) * len(plan.kv_blocks), kv_block=4)
        with closing(load_engine(source, plan)) as loaded:
            found = generate(loaded, ENDED)
            assert loaded.engine.scheduler.counts.preemptions > 0
            return found


def test_preempted_sequences_have_the_tokens_of_transformers(
    wanted: list[list[int]], checkpoint: Callable[..., Path]
) -> None:
    assert broken_tokens(checkpoint(FAMILY, **WIDE)) == wanted


def _stale(plain: Any) -> Any:
    def tokens_before(batch: Any, count: int, filler: int) -> torch.Tensor:
        """As a state would have them that was not updated after the last pass."""
        found = plain(batch, count + 1, filler)
        return torch.cat([found[:, :-2], found[:, -2:-1]], 1)[:, :count]

    return tokens_before


def _next_row(plain: Any) -> Any:
    return lambda self, rows, lookups: plain(self, np.minimum(rows + 1, len(self) - 1), lookups)


def _not_restored(plain: Any) -> Any:
    def cut(chunk: Any, count: int, most: int) -> Any:
        """A sequence that begins again goes on from what its slot has."""
        return (
            replace(piece, source=piece.targets[0]) if piece.source == pass_states.NO_SLOT else piece
            for piece in plain(chunk, count, most)
        )

    return cut


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (ngrams, "tokens_before", _stale),
        pytest.param(TableReader, "read", _next_row, marks=pytest.mark.slow),
        pytest.param(pass_states, "_cut", _not_restored, marks=pytest.mark.slow),
        pytest.param(AttentionCall, "leaves_out", lambda plain: lambda self, length: False, marks=pytest.mark.slow),
    ],
    ids=["stale last tokens", "a row off by one", "a state not restored", "all tokens attended to"],
)
def test_a_bug_shows_in_the_tokens(
    owner: Any,
    name: str,
    bug: Callable[[Any], Any],
    wanted: list[list[int]],
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative controls."""
    monkeypatch.setattr(owner, name, bug(getattr(owner, name)))
    assert broken_tokens(checkpoint(FAMILY, **WIDE)) != wanted


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ngram_vocab_size_base": 1400}, "ngram_embedding.weight is .15491, 70., wanted .14371, 70"),
        ({"seed": 4321}, "layer_multipliers' has other numbers than those that config.json makes"),
        ({"heads_per_ngram": 100, "ple_embed_dim": 800}, "heads_per_ngram is 100, wanted less: 400 heads"),
        ({"indexer_budget": None}, "indexer_budget is None, wanted a number"),
        ({"ple_conv_kernel_size": 5}, "conv1d.weight is .* wanted .192, 1, 5"),
    ],
)
def test_files_that_contradict_their_configuration_are_refused(
    change: dict[str, Any], says: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(checkpoint(FAMILY, **WIDE), tmp_path / "model"))
    values = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(values | change))
    with pytest.raises((BadCheckpoint, UnsupportedModel), match=says), opened(copy) as (source, plans):
        load_engine(source, plans[0])


def test_parts_of_a_table_of_several_kinds_or_with_one_number_are_refused(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(checkpoint(FAMILY, **WIDE), tmp_path / "model"))
    tensors = load_file(copy / "model.safetensors")
    name = next(name for name in tensors if "shard_3" in name)
    save_file(tensors | {name: tensors[name].half()}, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"ngram_embedding.* are of kinds"), opened(copy):
        pass
    tensors[name.replace("shard_3", "shard_02")] = tensors.pop(name)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"has 13278 rows, wanted 15491"), opened(copy) as (source, plans):
        load_engine(source, plans[0])


# What a process of its own reads of a model whose table is twice as large as its memory.
_CHILD = """
import json, sys
from contextlib import closing
from moedge.offload.memory import host_peak
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.settings.settings import MemoryBudget
from moedge.runtime.source.model_source import open_source
from runtime.test_ngram_models import ENDED, JOB, generate, settings

with open_source(sys.argv[1]) as source:
    plan = make_plan(source.shape, settings(), MemoryBudget(1 << 30), JOB)
    with closing(load_engine(source, plan)) as loaded:
        tokens, rows = generate(loaded, ENDED), loaded.rows
        found = {"tokens": tokens, "passed": loaded.engine.metrics.pass_tokens, "looked_up": rows.looked_up,
                 "reads": rows.reads, "kept": rows.kept, "nbytes": rows.nbytes}
    print(json.dumps(found | {"plan": plan.token_rows_nbytes, "table": plan.tables_nbytes, "peak": host_peak()}))
"""


@pytest.mark.slow
def test_a_table_larger_than_memory_is_read_row_by_row(tmp_path: Path, stock: Callable[[Path], Any]) -> None:
    folder = tmp_path / "model"
    try:
        model = save_tiny(FAMILY, folder, ple_embed_dim=700, ngram_vocab_size_base=383_500)
        wanted = stock_tokens(model, ENDED)
        del model
        tests = Path(__file__).parents[1]
        child = [sys.executable, "-c", _CHILD, str(folder)]
        done = subprocess.run(child, cwd=tests, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["tokens"] == wanted
        assert found["table"] >= 2 << 30
        assert found["peak"] <= 1 << 30
        assert found["looked_up"] == found["passed"] * found["plan"]
        assert 0 < found["reads"] <= found["passed"] * 20
    finally:
        shutil.rmtree(folder, ignore_errors=True)
