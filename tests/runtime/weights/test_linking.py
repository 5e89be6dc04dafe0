"""A store that names the checkpoint's own files has the bytes of one that copies them, and notices their changes."""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from moedge.offload.errors import BadCheckpoint, BadStore
from moedge.offload.store.manifest import MANIFEST, canonical, read_manifest
from moedge.offload.store.shard_file import ShardExtent, read_shard
from moedge.offload.store.store import Store
from moedge.offload.stream.stream import StreamBroken
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.loading.prepare import FinishedStore, prepare, prepare_linked, store_for, store_path
from moedge.runtime.model.loading import CheckpointLoader
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import budget_range, make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.shape.shards import copied_nbytes
from moedge.runtime.source.model_source import ModelSource, open_source
from moedge.runtime.weights.linking import Linker

JOB = Workload(2, 12)
SETTINGS = Settings(dtype="fp32", quant="none", kv="fp32", tokens_per_pass=16, max_sequences=2, deterministic=True)


def shards_of(store: Store) -> tuple[dict[str, bytes], list[bytes]]:
    """The bytes of every resident tensor, whose order differs, and of every shard."""

    def read(extent: ShardExtent) -> bytes:
        data = bytearray(extent.nbytes)
        read_shard(extent, memoryview(data))
        return bytes(data)

    resident = {name: read(tensor.extent) for name, tensor in store.resident.items()}
    return resident, [read(extent) for extent in list(store.extents())[len(resident) :]]


def linked(source: ModelSource, folder: Path) -> Path:
    assert prepare_linked(source, folder, "none", "fp32", Budgets(disk="0").on_cpu()) is not None
    return folder


@pytest.mark.sample("qwen3_moe-False", "gpt_oss-True")
@pytest.mark.parametrize(
    ("family", "copies"), [("qwen3_moe", False), ("deepseek_v3", False), ("gemma2", False), ("gpt_oss", True)]
)
def test_a_linked_store_has_the_bytes_of_a_copy(
    family: str, copies: bool, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """gpt_oss has its experts transposed: they are copied, and all else is named."""
    with open_source(str(checkpoint(family))) as source:
        written = prepare_linked(source, tmp_path / "linked", "none", "fp32", Budgets().on_cpu())
        prepare(source, tmp_path / "copy", "none", "fp32", Budgets().on_cpu())
        assert bool(copied_nbytes(source.shape, "none", "fp32")) == copies
    assert written is not None
    with Store.open(tmp_path / "linked") as named, Store.open(tmp_path / "copy") as copy:
        assert all(bool(extent.linked) != (copies and extent.tensor == "experts") for extent in named.extents())
        assert shards_of(named) == shards_of(copy)
        if not copies:
            assert named.manifest.nbytes == 4096 * len(named.manifest.files), "headers alone"


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_experts_between_the_first_and_the_last_are_read_not_packed(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, load = [], CheckpointLoader.load_experts

    def counting(self: CheckpointLoader, index: int, experts: object, up: str, which: range, kept: object) -> object:
        packed.extend(which)
        return load(self, index, experts, up, which, kept)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointLoader, "load_experts", counting)
    with open_source(str(checkpoint(family))) as source:
        linked(source, tmp_path / "store")
        count = max(layer.experts.count for layer in source.shape.layers if layer.experts)
    assert count > 2
    assert set(packed) == {0, count - 1}


def test_weights_between_the_first_and_the_last_expert_that_are_not_finite_are_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = own_copy(checkpoint("qwen3_moe"), tmp_path / "checkpoint")
    with open_source(str(folder)) as source:
        store = linked(source, tmp_path / "store")
    part = read_manifest(store / MANIFEST).files[1].linked["experts"].shards[2].parts[0]
    for path in folder.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[part.offset : part.offset + 4] = b"\xff\xff\xff\x7f"
        path.write_bytes(data)
    with open_source(str(folder)) as source, pytest.raises(BadCheckpoint, match=r"expert 2.*NaN or infinite"):
        linked(source, tmp_path / "again")


def test_experts_that_lie_in_another_order_are_copied(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """The last one shows that what holds for the first does not hold for all."""
    with open_source(str(checkpoint("qwen3_moe"))) as source:
        of_expert = Linker.of_expert
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Linker, "of_expert", lambda self, first, expert: of_expert(self, first, max(0, expert - 1)))
            assert prepare_linked(source, tmp_path / "store", "none", "fp32", Budgets().on_cpu()) is None


def streaming_plan(source: ModelSource) -> Plan:
    smallest, _ = budget_range(source.shape, SETTINGS, JOB)
    return make_plan(source.shape, SETTINGS, MemoryBudget(smallest, None, 0), JOB)


def tokens(source: ModelSource, plan: Plan, store: Path) -> tuple[list[list[int]], int]:
    """What two sequences are continued with, and the bytes that passes read."""
    with closing(load_engine(source, plan, store)) as loaded:
        sequences = [Sequence([5, 80, 31 + index], SequenceSampling(6, ignore_eos=True)) for index in range(2)]
        for sequence in sequences:
            loaded.engine.add(sequence)
        list(loaded.engine.run())
        return [each.tokens(0, each.num_tokens) for each in sequences], loaded.streamed.nbytes_from_disk


def test_without_any_disk_a_model_streams_from_its_own_files(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with open_source(str(checkpoint("qwen3_moe"))) as source:
        plan = streaming_plan(source)
        found = store_for(source, plan, Budgets(disk="0", disk_dir=tmp_path))
        assert found is not None
        assert found.folder == store_path(source, "none", "fp32", tmp_path, linked=True)
        assert found.nbytes_written < copied_nbytes(source.shape, "int8", "fp32") // 10
        again = store_for(source, plan, Budgets(disk="0", disk_dir=tmp_path))
        assert again == FinishedStore(found.folder), "nothing is read again"
        named, nbytes = tokens(source, plan, found.folder)
        prepare(source, tmp_path / "copy", "none", "fp32", Budgets().on_cpu())
        copied, nbytes_of_copy = tokens(source, plan, tmp_path / "copy")
        assert named == copied
        assert min(nbytes, nbytes_of_copy) > 0
        # A copy that was prepared before is used.
        prepare(source, copy := store_path(source, "none", "fp32", tmp_path), "none", "fp32", Budgets().on_cpu())
        assert store_for(source, plan, Budgets(disk_dir=tmp_path)) == FinishedStore(copy)


def own_copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_files_that_changed_are_noticed(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """By size and time when the store is opened, by checksums where neither shows it."""
    folder = own_copy(checkpoint("qwen3_moe"), tmp_path / "checkpoint")
    weights = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    with open_source(str(folder)) as source:
        store, plan = linked(source, tmp_path / "store"), streaming_plan(source)
        before, data = weights.stat(), bytearray(weights.read_bytes())
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
        with pytest.raises(BadStore, match=r"changed after its checksums were taken: .*`moedge models rm`"):
            Store.open(store)
        # All of a layer's: which of them a pass wants is not what is tested.
        for expert in read_manifest(store / MANIFEST).files[1].linked["experts"].shards:
            data[expert.parts[0].offset] ^= 1
        weights.write_bytes(data)
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises((BadStore, StreamBroken), match="download the checkpoint again"):
            tokens(source, plan, store)
        weights.unlink()
        with pytest.raises(BadStore, match="put it back"):
            Store.open(store)


def edited(store: Path, change: Callable[[dict[str, object]], None]) -> None:
    """Changes a manifest and makes its CRC32 right again."""
    content = json.loads((store / MANIFEST).read_bytes())
    del content["crc32"]
    change(content)
    content["crc32"] = f"{zlib.crc32(canonical(content)):08x}"
    (store / MANIFEST).write_bytes(canonical(content) + b"\n")


@pytest.fixture(scope="module")
def linked_store(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    with open_source(str(checkpoint("qwen3_moe"))) as source:
        return linked(source, tmp_path_factory.mktemp("linked") / "store")


@pytest.mark.parametrize(
    ("field", "value"), [(0, -4096), (0, 1 << 40), (1, 99), (1, -1), (2, 1 << 50), (2, -1), (3, 1 << 50), (3, -1)]
)
def test_parts_outside_their_shard_or_file_are_refused(
    field: int, value: int, linked_store: Path, tmp_path: Path
) -> None:
    store = Path(shutil.copytree(linked_store, tmp_path / "store"))

    def change(content: dict[str, object]) -> None:
        (layer,) = (file for file in content["files"] if file["name"] == "layer-0000.safetensors")  # type: ignore[index, attr-defined]
        layer["linked"]["experts"]["shards"][0][1][0][field] = value

    edited(store, lambda content: None)
    Store.open(store).close()
    edited(store, change)
    with pytest.raises(BadStore, match="is damaged"):
        Store.open(store)
