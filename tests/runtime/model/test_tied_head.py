"""`runtime/shape/shards.py` packs an output head that is the embedding in a format of its own; tokens are looked up in
the embedding as the checkpoint has it, on the disk where weights stream.
"""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.evaluation.reference import as_packed
from moedge.runtime.loading.engine_loader import LoadedEngine, load_engine
from moedge.runtime.loading.prepare import prepare
from moedge.runtime.plan.placement import Workload, on_device_nbytes
from moedge.runtime.plan.planner import budget_range, make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.shape.shards import TIED_HEAD, model_shards
from moedge.runtime.source.model_source import open_source
from moedge.runtime.source.stored_model import StoredEmbedding

Folder = Callable[..., Path]
# A vocabulary of no round number; scores that are bounded, experts and multipliers, neither.
SIZES = {"vocab_size": 393, "hidden_size": 72, "tie_word_embeddings": True}
FAMILIES = ("llama", "gemma2", "granitemoe")
JOB = Workload(8, 64)
INT4 = Settings(dtype="bf16", quant="int4", kv="bf16")


@contextmanager
def engine(folder: Path, settings: Settings = INT4, store: Path | None = None) -> Iterator[LoadedEngine]:
    """In memory, or streaming from a store that is made."""
    with open_source(str(folder)) as source:
        nbytes = 4 << 30 if store is None else budget_range(source.shape, settings, JOB)[0]
        plan = make_plan(source.shape, settings, MemoryBudget(nbytes), JOB)
        if store is not None:
            prepare(source, store, plan.quant, plan.dtype, Budgets(disk="256MiB").on_cpu())
        with closing(load_engine(source, plan, store)) as loaded:
            yield loaded


def embedding_of(folder: Path) -> torch.Tensor:
    (weight,) = [each for name, each in load_file(folder / "model.safetensors").items() if "embed_tokens" in name]
    return weight


def tokens_of(loaded: LoadedEngine) -> list[list[int]]:
    sequences = [Sequence([7 + length, 391, 3][:length], SequenceSampling(12, ignore_eos=True)) for length in (1, 2, 3)]
    for sequence in sequences:
        loaded.engine.add(sequence)
    list(loaded.engine.run())
    return [sequence.output_ids for sequence in sequences]


@pytest.mark.parametrize("quant", ["int8", "int4", "mxfp4"])
@pytest.mark.parametrize(("family", "width"), [*((family, 72) for family in FAMILIES), ("llama", 96)])
def test_a_tied_head_has_codes_of_its_own_and_leaves_the_embedding(
    family: str, width: int, quant: str, checkpoint: Folder
) -> None:
    """In int8: with a scale for 32 columns, where these divide the matrix, else for a row."""
    folder = checkpoint(family, **SIZES | {"hidden_size": width})
    weight = embedding_of(folder).bfloat16()
    with engine(folder, Settings(dtype="bf16", quant=quant, kv="bf16")) as loaded:
        packed: Any = loaded.model.head.packed
        assert packed.layout.format == (TIED_HEAD if width == 96 else "int8")
        assert torch.equal(loaded.model.model.get_input_embeddings().weight, weight)
        x = torch.randn(5, width, generator=torch.Generator().manual_seed(3)).bfloat16()
        wanted = x.double() @ as_packed(weight, packed.layout).double().t()
        errors = loaded.model.head(x).double() - wanted
        # A sum of products in float32 at best, rounded to 8 bits.
        bound = 2**-8 * wanted.abs() + width * 2**-9 * (x.double().abs() @ weight.double().abs().t()) / 8
        assert bool((errors.abs() <= bound).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_looked_up_on_the_disk_where_weights_stream(family: str, checkpoint: Folder, tmp_path: Path) -> None:
    folder = checkpoint(family, **SIZES)
    with engine(folder) as loaded:
        wanted = tokens_of(loaded)
    with engine(folder, store=tmp_path / "store") as loaded:
        looked_up = loaded.model.model.get_input_embeddings()
        assert isinstance(looked_up, StoredEmbedding)
        assert tokens_of(loaded) == wanted
        assert looked_up.reader.counts.looked_up > 0


def test_a_head_of_unquantized_weights_is_the_embedding(checkpoint: Folder) -> None:
    """Nothing is copied, in memory or in a store."""
    folder = checkpoint("llama", **SIZES)
    with engine(folder, Settings(dtype="bf16", quant="none", kv="bf16")) as loaded:
        weight = loaded.model.model.get_input_embeddings().weight
        (codes, *_) = loaded.model.head.packed.planes
        assert codes.data_ptr() == weight.data_ptr()
        assert loaded.shards.head is None


def test_a_device_holds_the_codes_and_not_the_embedding(checkpoint: Folder) -> None:
    with open_source(str(checkpoint("llama", **SIZES))) as source:
        shape = source.shape
    exact, packed = (model_shards(shape, quant, "bf16") for quant in ("none", "int4"))
    assert packed.head is not None
    embedding = 393 * 72 * 2
    assert on_device_nbytes(shape, exact, "bf16") - on_device_nbytes(shape, packed, "bf16") == embedding
    assert embedding // 2 <= packed.head.nbytes < embedding
