"""Whatever call of `offload/store/writer.py` is the last one: no store opens that is not whole, and the next run ends
with the same bytes.
"""

import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moedge.offload.errors import BadStore, DiskFull, FolderRefused
from moedge.offload.store.manifest import HEAD_FILE, RESIDENT_FILE, layer_file
from moedge.offload.store.store import Store
from moedge.offload.store.writer import StoreWriter, TensorSpec

NBYTES = 4096


class Crash(BaseException):
    """The process is dead from here on: no call has any effect."""


@dataclass
class Disk:
    """Stands between the writer and the file system, counts the calls that change it and ends them at `last`.

    What was not synchronised may be lost with the power: `lose` takes it away at random. With `fault`, that call fails
    with this error and the process lives on.
    """

    last: int
    fault: int = 0
    calls: int = 0
    unsynced: dict[str, bool] = field(default_factory=dict)
    names: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    paths: dict[int, str] = field(default_factory=dict)

    def count(self) -> None:
        self.calls += 1
        if self.fault and self.calls == self.last:
            raise OSError(self.fault, os.strerror(self.fault))
        if not self.fault and self.calls >= self.last:
            raise Crash

    def lose(self, generator: random.Random) -> None:
        """The power fails: names and data that were not synchronised are there, or not, or zeros."""
        for path in self.unsynced:
            if os.path.exists(path) and generator.random() < 0.7:
                size = os.path.getsize(path)
                kept = generator.randint(0, size)
                os.truncate(path, kept)
                if generator.random() < 0.7:
                    os.truncate(path, size)
        for _, undo in reversed(self.names):
            if generator.random() < 0.5:
                undo()


@contextmanager
def patched(disk: Disk, data_is_synced: bool = True) -> Iterator[None]:
    real = {name: getattr(os, name) for name in ("open", "pwrite", "fsync", "replace", "unlink", "mkdir", "close")}

    def opened(path: Any, flags: int, *arguments: Any) -> int:
        if flags & os.O_CREAT and not os.path.exists(path):
            disk.count()
            disk.names.append((str(path), lambda: Path(path).unlink(missing_ok=True)))
        descriptor = real["open"](path, flags, *arguments)
        disk.paths[descriptor] = str(path)
        return int(descriptor)

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        disk.unsynced[disk.paths[descriptor]] = True
        try:
            disk.count()
        except Crash:
            if disk.calls == disk.last:
                real["pwrite"](descriptor, data[: len(data) // 2], offset)
            raise
        return int(real["pwrite"](descriptor, data, offset))

    def fsync(descriptor: int) -> None:
        disk.count()
        if os.path.isdir(disk.paths[descriptor]):
            disk.names.clear()
        elif data_is_synced:
            disk.unsynced.pop(disk.paths[descriptor], None)

    def replace(source: Any, target: Any) -> None:
        disk.count()
        before = Path(target).read_bytes() if os.path.exists(target) else None
        real["replace"](source, target)
        if disk.unsynced.pop(str(source), None):
            disk.unsynced[str(target)] = True
        disk.names.append((str(target), lambda: rename_back(source, target, before)))

    def unlink(path: Any) -> None:
        disk.count()
        before = Path(path).read_bytes()
        real["unlink"](path)
        disk.names.append((str(path), lambda: put_back(Path(path), before)))

    def mkdir(path: Any, mode: int = 0o777) -> None:
        if not os.path.exists(path):
            disk.count()
        real["mkdir"](path, mode)

    with pytest.MonkeyPatch.context() as patch:
        for function in (pwrite, fsync, replace, unlink, mkdir):
            patch.setattr(os, function.__name__, function)
        patch.setattr(os, "open", opened)
        yield


def rename_back(source: Any, target: Any, before: bytes | None) -> None:
    if os.path.exists(target):
        os.replace(target, source)
    if before is not None:
        Path(target).write_bytes(before)


def put_back(path: Path, before: bytes) -> None:
    if not path.exists():
        path.write_bytes(before)


def write(folder: Path, salt: bytes = b"new") -> None:
    """Two layers, the head and a resident tensor; `salt` is in the recipe and in every shard."""
    with StoreWriter(folder, {"salt": salt.hex()}, "abc") as writer:
        for index in range(2):
            if not writer.has(layer_file(index)):
                with writer.layer(index, NBYTES, 2, NBYTES) as layer:
                    layer.write("dense", 0, shard(salt, index))
                    for expert in range(2):
                        layer.write("experts", expert, shard(salt, 8 * index + expert))
        if not writer.has(HEAD_FILE):
            writer.write_head(shard(salt, 99))
        if not writer.has(RESIDENT_FILE):
            with writer.resident([TensorSpec("norm", "F32", (4,))]) as resident:
                resident.write("norm", 0, shard(salt, 98)[:16])
        writer.finish({"salt": salt.hex()})


def shard(salt: bytes, seed: int) -> memoryview:
    return memoryview(random.Random(salt + bytes([seed])).randbytes(NBYTES))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def nothing(folder: Path) -> None:
    """The first preparation of a model."""


def half(folder: Path) -> None:
    """A preparation that was killed half way."""
    with pytest.raises(Crash), patched(Disk(last=40)):
        write(folder)


def another(folder: Path) -> None:
    """A finished store of another making."""
    write(folder, b"old")


def damaged(folder: Path) -> None:
    """A finished store of this making, one shard of which is damaged."""
    write(folder)
    path = folder / layer_file(1)
    path.write_bytes(path.read_bytes()[:-1] + b"?")


BEFORE = [nothing, half, another, damaged]


def whole(folder: Path, allowed: list[dict[str, bytes]]) -> bool:
    """Whether a store opens; one that does holds exactly what it may hold."""
    try:
        Store.open(folder).close()
    except BadStore:
        return False
    assert snapshot(folder) in allowed
    return True


def run_to(folder: Path, disk: Disk, data_is_synced: bool = True) -> bool:
    """Whether the writer got to its end before the disk stopped it."""
    try:
        with patched(disk, data_is_synced):
            write(folder)
    except Crash:
        return False
    return True


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on the real disk's caches: what is lost is what `Disk.lose` takes."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def reference(tmp_path: Path) -> dict[str, bytes]:
    write(tmp_path / "reference")
    return snapshot(tmp_path / "reference")


@pytest.mark.parametrize("before", BEFORE)
def test_killed_at_any_call_it_leaves_nothing_wrong(
    tmp_path: Path, reference: dict[str, bytes], before: Callable[[Path], None]
) -> None:
    refused = opened = 0
    for last in range(1, 1000):
        folder = tmp_path / str(last)
        before(folder)
        allowed = [reference, *([snapshot(folder)] if folder.exists() else [])]
        finished = run_to(folder, Disk(last))
        if whole(folder, allowed):
            opened += 1
        else:
            refused += 1
        write(folder)
        assert snapshot(folder) == reference
        if finished:
            break
    assert refused >= 10
    assert opened >= 1


def power_losses(
    tmp_path: Path, before: Callable[[Path], None], data_is_synced: bool = True
) -> Iterator[tuple[Path, Any]]:
    generator = random.Random(before.__name__)
    for trial in range(100):
        folder = tmp_path / str(trial)
        before(folder)
        earlier = snapshot(folder) if folder.exists() else {}
        disk = Disk(last=generator.randint(1, 90))
        run_to(folder, disk, data_is_synced)
        disk.lose(generator)
        yield folder, earlier


@pytest.mark.sample(2)
@pytest.mark.parametrize("before", BEFORE)
def test_losing_power_at_any_call_leaves_nothing_wrong(
    tmp_path: Path, reference: dict[str, bytes], before: Callable[[Path], None]
) -> None:
    """Of data and names that were not synchronised, any part may be missing or zero."""
    refused = 0
    for folder, earlier in power_losses(tmp_path, before):
        refused += not whole(folder, [reference, earlier])
        write(folder)
        assert snapshot(folder) == reference
    assert refused > 10


def test_without_synchronised_data_power_loss_would_leave_a_wrong_store(
    tmp_path: Path, reference: dict[str, bytes]
) -> None:
    """The control: the test above can fail."""
    wrong = 0
    for folder, earlier in power_losses(tmp_path, nothing, data_is_synced=False):
        try:
            whole(folder, [reference, earlier])
        except AssertionError:
            wrong += 1
    assert wrong > 0


@pytest.mark.sample("nothing-28", "another-5")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("before", BEFORE)
def test_any_call_may_fail(
    tmp_path: Path, reference: dict[str, bytes], before: Callable[[Path], None], code: int
) -> None:
    """The failure is reported, no temporary file and no descriptor stays, and the next run ends with the same bytes."""
    failures: list[type[BaseException]] = []
    for last in range(1, 1000):
        folder = tmp_path / str(last)
        before(folder)
        allowed = [reference, *([snapshot(folder)] if folder.exists() else [])]
        descriptors = len(os.listdir("/proc/self/fd"))
        disk = Disk(last, fault=code)
        try:
            with patched(disk):
                write(folder)
        except (DiskFull, FolderRefused, OSError) as error:
            failures.append(type(error))
            assert len(os.listdir("/proc/self/fd")) == descriptors
            assert not list(folder.glob(".*.tmp")) or before is half
            if (folder / "lock").exists():
                whole(folder, allowed)
        write(folder)
        assert snapshot(folder) == reference
        if disk.calls < last:
            break
    assert len(failures) == last - 1
    assert (failures.count(DiskFull) > 15) == (code == errno.ENOSPC)


@pytest.mark.slow
def test_killed_for_real_at_random_instants_it_ends_with_the_same_bytes() -> None:
    """In a process of its own, which forks: this one has threads. tests/matrix/kills.py is the long version."""
    code = "from matrix.kills import faults; print(faults('prepare', 15, 0))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "15 kills" in done.stdout
    assert done.stdout.endswith("\n[]\n"), done.stdout
