"""Stores under one root: listed, removed when nobody uses them, and bounded all together."""

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedge.offload.errors import BadStore, OutOfBudget, StoreInUse
from moedge.offload.store.manifest import MANIFEST
from moedge.offload.store.store import Store
from moedge.offload.store.stores import (
    RESERVE_NBYTES,
    default_root,
    disk_budget,
    disk_nbytes,
    prune,
    remove,
    store_folder,
    stores,
)
from moedge.offload.store.writer import StoreWriter

GIB = 1 << 30
NBYTES = 4096


def make(root: Path, name: str, used: int, num_pages: int = 1, finished: bool = True) -> Path:
    """A store of `num_pages` pages of weights, last used at that second."""
    folder = root / name
    with StoreWriter(folder, {"quant": name}, "abc") as writer:
        writer.write_head(memoryview(bytes(num_pages * NBYTES)))
        if finished:
            writer.finish({})
    os.utime(folder / "lock", (used, used))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "stores"
    for name, used, num_pages in (("b", 300, 4), ("a", 200, 2), ("c", 100, 1)):
        make(root, name, used, num_pages)
    return root


def names(root: Path) -> list[str]:
    return [store.name for store in stores(root)]


def free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 50, 0, nbytes))


def test_the_root_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_root() == tmp_path / "moedge" / "stores"


def test_every_making_has_a_folder_of_its_own_with_a_readable_name() -> None:
    root = Path("r")
    first = store_folder(root, "Qwen/Qwen3-30B-A3B", "abc", {"quant": "nf4"})
    assert first.parent == root
    assert first.name.startswith("Qwen-Qwen3-30B-A3B-")
    assert first == store_folder(root, "Qwen/Qwen3-30B-A3B", "abc", {"quant": "nf4"})
    assert len({first, store_folder(root, "Qwen/Qwen3-30B-A3B", "abd", {"quant": "nf4"})}) == 2
    assert len({first, store_folder(root, "Qwen/Qwen3-30B-A3B", "abc", {"quant": "int8"})}) == 2


@given(st.text(max_size=300))
def test_no_model_name_leads_out_of_the_root(model: str) -> None:
    folder = store_folder(Path("root"), model, "abc", {})
    assert folder.parent == Path("root")
    assert folder.name == os.path.basename(folder.name)
    assert not folder.name.startswith(".")
    assert len(os.fsencode(folder.name)) <= 100


def test_the_list_tells_finished_begun_and_damaged_apart(root: Path) -> None:
    make(root, "begun", 400, finished=False)
    (root / "a" / MANIFEST).write_bytes(b"{}")
    (root / "no store").mkdir()
    (root / "file").touch()
    found = {store.name: store for store in stores(root)}
    assert {name: store.complete for name, store in found.items()} == {"a": False, "b": True, "begun": False, "c": True}
    assert found["a"].recipe is None
    assert found["begun"].recipe == {"quant": "begun"}
    assert found["c"].last_used == 100
    assert found["b"].nbytes == sum(path.stat().st_size for path in (root / "b").iterdir())
    assert stores(root / "nowhere") == []


def test_a_removed_store_is_gone(root: Path) -> None:
    remove(root / "a")
    assert not (root / "a").exists()
    assert names(root) == ["b", "c"]


def test_a_store_in_use_is_not_removed(root: Path) -> None:
    with Store.open(root / "a"), pytest.raises(StoreInUse):
        remove(root / "a")
    Store.open(root / "a").close()


def test_only_stores_are_removed(root: Path) -> None:
    (root / "a" / "notes.txt").touch()
    with pytest.raises(BadStore, match=r"notes\.txt"):
        remove(root / "a")
    Store.open(root / "a").close()
    for folder in (root, root / "nowhere"):
        with pytest.raises(BadStore, match="not a store"):
            remove(folder)
    assert names(root) == ["a", "b", "c"]
    assert not (root / "lock").exists()


@pytest.mark.parametrize("again", [True, False])
def test_a_lock_on_a_removed_store_is_worth_nothing(root: Path, monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    """A process that opened the lock just before the store was removed looks again: for the new store, or for none."""
    opened = []
    real = os.open

    def open_late(path: object, *arguments: object) -> int:
        descriptor = real(path, *arguments)  # type: ignore[arg-type]
        if str(path).endswith("lock") and not opened:
            opened.append(descriptor)
            remove(root / "a")
            if again:
                make(root, "a", 1)
        return descriptor

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_late)
        if not again:
            with pytest.raises(BadStore, match="not a store"):
                Store.open(root / "a")
            return
        store = Store.open(root / "a")
    with pytest.raises(StoreInUse):
        remove(root / "a")
    store.close()


def test_pruning_removes_the_least_recently_used_first(root: Path) -> None:
    total = sum(store.nbytes for store in stores(root))
    assert prune(root, total) == []
    assert [store.name for store in prune(root, total - 1)] == ["c"]
    Store.open(root / "a").close()
    assert [store.name for store in prune(root, 1)] == ["b", "a"]
    assert stores(root) == []


def test_pruning_passes_over_stores_in_use(root: Path) -> None:
    with Store.open(root / "c"):
        os.utime(root / "c" / "lock", (100, 100))
        assert [store.name for store in prune(root, 0)] == ["a", "b"]
    assert names(root) == ["c"]


def test_auto_is_what_the_store_needs_and_leaves_a_reserve(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = sum(store.nbytes for store in stores(root))
    free(monkeypatch, RESERVE_NBYTES + 12 * GIB)
    assert disk_budget(root / "new", 12 * GIB, None) == others + 12 * GIB
    with pytest.raises(
        OutOfBudget, match=r"takes 12\.01 GiB but the disk, with 10\.00 GiB or half of it left free, allows 12\.00 GiB"
    ):
        disk_budget(root / "new", 12 * GIB + 1, None)


def test_half_of_a_small_disk_is_left_free(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of a few MB fits a disk with less free than the reserve of a large one."""
    others = sum(store.nbytes for store in stores(root))
    for free_nbytes in (3, 8 * GIB, 2 * RESERVE_NBYTES - 1):
        free(monkeypatch, free_nbytes)
        assert disk_budget(root / "new", free_nbytes // 2, None) == others + free_nbytes // 2
        with pytest.raises(OutOfBudget, match="left free, allows"):
            disk_budget(root / "new", free_nbytes // 2 + 1, None)
    free(monkeypatch, 0)
    with pytest.raises(OutOfBudget, match=r"allows 0\.00 KiB"):
        disk_budget(root / "new", 1, None)


def test_a_given_budget_bounds_all_stores_together(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = sum(store.nbytes for store in stores(root))
    free(monkeypatch, 100 * GIB)
    assert disk_budget(root / "new", 5 * GIB, others + 5 * GIB) == others + 5 * GIB
    with pytest.raises(OutOfBudget, match=r"allows 4\.99 GiB; remove other stores, .* raise --disk to 5\.01 GiB"):
        disk_budget(root / "new", 5 * GIB, others + 5 * GIB - 1)
    with pytest.raises(OutOfBudget, match=r"--disk 0\.00 KiB allows 0\.00 KiB"):
        disk_budget(root / "new", 1, 0)
    free(monkeypatch, GIB)
    with pytest.raises(OutOfBudget, match=r"allows 1\.00 GiB"):
        disk_budget(root / "new", 5 * GIB, 50 * GIB)


def test_what_is_already_written_counts_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = disk_nbytes(root / "b")
    others = sum(store.nbytes for store in stores(root)) - begun
    free(monkeypatch, 0)
    assert disk_budget(root / "b", begun, others + begun) == others + begun
    with pytest.raises(OutOfBudget):
        disk_budget(root / "new", begun, others + 2 * begun)


def test_a_root_that_is_not_there_yet_has_the_room_of_its_disk(tmp_path: Path) -> None:
    assert disk_budget(tmp_path / "a" / "b" / "c", NBYTES, NBYTES) == NBYTES
    assert os.listdir(tmp_path) == []
