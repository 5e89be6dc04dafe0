"""A memory ceiling binds (`tests/support/memory_ceiling.py`), and what is said of it is what the kernel counted; so are
pages in the page cache (`tests/support/page_cache.py`).
"""

import mmap
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import memory_ceiling as ceiling
from support import page_cache
from support.memory_ceiling import V1, V2, Interface, MemoryGroup, NoGroup

MIB = 1 << 20
CEILING = Path(ceiling.__file__)


def fake(folder: Path, interface: Interface, limit: str = "max", peak: int = 0, oom: str = "oom_kill 0") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {interface.limit: limit, interface.peak: f"{peak}\n", interface.oom: f"{oom}\n"}.items():
        (folder / name).write_text(text)
    return folder


def no_swap(folder: Path) -> Path:
    (folder / "swaps").write_text("Filename Type Size Used Priority\n")
    return folder / "swaps"


V1_OOM = "oom_kill_disable 0\nunder_oom 0\noom_kill {}"
V2_OOM = "low 0\nhigh 7\nmax 31\noom 2\noom_kill {}\noom_group_kill 0"


@pytest.mark.parametrize(("interface", "oom"), [(V1, V1_OOM), (V2, V2_OOM)])
@pytest.mark.parametrize("count", [0, 1, 12])
def test_a_group_says_its_peak_and_whether_the_kernel_killed_in_it(
    interface: Interface, oom: str, count: int, tmp_path: Path
) -> None:
    folder = fake(tmp_path / "group", interface, peak=123456789, oom=oom.format(count))
    group = MemoryGroup(folder, interface, 200 * MIB, swaps=no_swap(tmp_path))
    assert (folder / interface.limit).read_text() == str(200 * MIB)
    assert group.peak() == 123456789
    assert group.killed() == (count > 0)


def test_reaching_the_limit_is_not_being_killed(tmp_path: Path) -> None:
    """A reader of files reaches it all the time: `oom` and `max` count that, `oom_kill` does not."""
    folder = fake(tmp_path / "group", V2, peak=100, oom="max 99\noom 3\noom_kill 0")
    assert not MemoryGroup(folder, V2, 100, swaps=no_swap(tmp_path)).killed()


def test_a_kernel_that_does_not_count_kills_is_not_believed(tmp_path: Path) -> None:
    folder = fake(tmp_path / "group", V1, oom="oom_kill_disable 0\nunder_oom 0")
    with pytest.raises(NoGroup, match="oom_kill"):
        MemoryGroup(folder, V1, 100, swaps=no_swap(tmp_path)).killed()


@pytest.mark.parametrize(("interface", "wanted"), [(V1, str(100 * MIB)), (V2, "0")])
def test_nothing_is_swapped(interface: Interface, wanted: str, tmp_path: Path) -> None:
    folder = fake(tmp_path / "group", interface)
    (folder / interface.swap).write_text("max")
    MemoryGroup(folder, interface, 100 * MIB)
    assert (folder / interface.swap).read_text() == wanted
    (folder / interface.swap).unlink()
    swaps = no_swap(tmp_path)
    swaps.write_text(swaps.read_text() + "/swap file 1000 0 -2\n")
    with pytest.raises(NoGroup, match="swapoff"):
        MemoryGroup(folder, interface, 100 * MIB, swaps=swaps)


def test_a_controller_that_is_off_is_no_group(tmp_path: Path) -> None:
    """Files of another hierarchy, or none: nothing that is written there limits anything."""
    for present in ([], [V2.limit], [V2.limit, V2.oom]):
        folder = tmp_path / str(len(present))
        folder.mkdir()
        for name in present:
            (folder / name).write_text("max")
        with pytest.raises(NoGroup, match="memory controller is off"):
            MemoryGroup(folder, V2, 100)


def test_a_limit_that_is_not_taken_is_no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fake(tmp_path / "group", V1, limit="9223372036854771712")
    monkeypatch.setattr(Path, "write_text", lambda *_: 0)
    with pytest.raises(NoGroup, match="9223372036854771712 after 100"):
        MemoryGroup(folder, V1, 100)


def hierarchy(root: Path, *groups: str) -> Path:
    for group in groups:
        (root / group).mkdir(parents=True, exist_ok=True)
        (root / group / "cgroup.procs").touch()
    return root


def test_groups_are_made_at_the_root_or_where_this_process_is(tmp_path: Path) -> None:
    both = hierarchy(tmp_path, "memory", "memory/jobs", "memory/jobs/mine", "unified")
    own = "9:cpu,cpuacct:/jobs\n4:memory:/jobs/mine\n0::/jobs/mine\n"
    assert list(ceiling.places(both, own)) == [
        (V1, both / "memory"),
        (V1, both / "memory/jobs"),
        (V1, both / "memory/jobs/mine"),
    ]
    new = hierarchy(tmp_path / "new", ".", "user.slice", "user.slice/shell.scope")
    assert [place for _, place in ceiling.places(new, "0::/user.slice/shell.scope\n")] == [
        new, new / "user.slice", new / "user.slice/shell.scope",
    ]  # fmt: skip


def test_where_no_group_can_be_made_the_reason_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    root = hierarchy(tmp_path, ".", "mine")
    with pytest.raises(NoGroup, match=r"no memory controller takes a new group .* run as root"):
        ceiling.make_group(100, root, "0::/mine\n")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["cgroup.procs", "cgroup.procs", "mine"]
    with pytest.raises(NoGroup, match="none is mounted"):
        ceiling.make_group(100, tmp_path / "nowhere", "0::/\n")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Eight MiB that are in the page cache, on a file system that can let go of them."""
    path = tmp_path / "file"
    path.write_bytes(random.Random(0).randbytes(8 * MIB))
    assert page_cache.resident_nbytes([path]) == 8 * MIB
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if page_cache.resident_nbytes([path]) == 8 * MIB:
        pytest.skip("temporary files lie on a file system that is memory")
    path.read_bytes()
    return path


def test_a_dropped_file_is_gone_from_the_page_cache(file: Path) -> None:
    assert page_cache.resident_nbytes([file]) == 8 * MIB
    page_cache.drop([file])
    assert page_cache.resident_nbytes([file]) == 0
    with file.open("rb") as opened:
        opened.read(100)
    assert 0 < page_cache.resident_nbytes([file]) < 8 * MIB


def test_pages_are_counted_across_windows(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "WINDOW", 3 * MIB)
    file.write_bytes(file.read_bytes() + b"one more")
    assert page_cache.resident_nbytes([file]) == 8 * MIB + mmap.PAGESIZE


def test_a_file_that_stays_in_the_page_cache_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that another process maps does."""
    monkeypatch.setattr(page_cache, "ATTEMPTS", 1)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE])
        with pytest.raises(page_cache.StillCached, match=f"MB of {file} stay in the page cache"):
            page_cache.drop([file])


def test_files_are_found_once(tmp_path: Path) -> None:
    (tmp_path / "model" / "deep").mkdir(parents=True)
    for name in ("a", "deep/b"):
        (tmp_path / "model" / name).write_text("abc")
    (tmp_path / "model" / "link").symlink_to("a")
    files = page_cache.files_in([tmp_path / "model", tmp_path / "model" / "a"])
    assert [path.name for path in files] == ["a", "b"]
    assert page_cache.nbytes(files) == 6


READ = (
    "import sys, mmap; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); sum(m[::4096])"
)


def test_bytes_from_disk_are_counted_and_those_from_memory_are_not(file: Path) -> None:
    """Page faults of a mapping, in a child of the command: what a reader through mmap does."""
    command = ["sh", "-c", 'nice -n 0 "$@"', "sh", sys.executable, "-c", READ, str(file)]
    assert ceiling.run(command).read_nbytes < 4 * MIB
    page_cache.drop([file])
    cold = ceiling.run(command)
    assert cold.code == 0
    assert 8 * MIB <= cold.read_nbytes < 24 * MIB
    assert (cold.peak_nbytes, cold.killed) == (None, False)


@pytest.fixture
def _groups() -> Iterator[None]:
    try:
        with ceiling.make_group(64 * MIB):
            pass
    except NoGroup as error:
        pytest.skip(f"a real memory group is wanted: {error}")
    before = set(ours())
    yield
    assert set(ours()) == before, "a group was left behind"


def ours(process: int | None = None) -> list[str]:
    """Groups that a process, this one where none is given, has made and not removed."""
    return [str(path) for path in ceiling.CGROUPS.glob(f"**/ceiling-{process or os.getpid()}-*")]


TAKE = (
    "import os, sys; data = bytearray(int(sys.argv[1]) << 20); data[::4096] = b'x' * len(data[::4096]); print('done')"
)


@pytest.mark.usefixtures("_groups")
def test_what_stays_below_the_ceiling_shows_its_peak() -> None:
    done = ceiling.run([sys.executable, "-c", TAKE, "60"], 100 * MIB)
    assert (done.code, done.out.strip(), done.killed) == (0, "done", False)
    assert done.peak_nbytes is not None
    assert 60 * MIB <= done.peak_nbytes < 100 * MIB


@pytest.mark.usefixtures("_groups")
def test_what_goes_beyond_the_ceiling_is_killed_and_the_kernel_says_so() -> None:
    done = ceiling.run([sys.executable, "-c", TAKE, "200"], 100 * MIB)
    assert (done.code, done.out, done.killed, done.late) == (-9, "", True, False)
    assert done.peak_nbytes is not None
    assert 90 * MIB < done.peak_nbytes <= 100 * MIB


@pytest.mark.usefixtures("_groups")
def test_a_killed_child_is_seen_whatever_the_exit_code_says() -> None:
    done = ceiling.run(["sh", "-c", '"$@"; exit 0', "sh", sys.executable, "-c", TAKE, "200"], 100 * MIB)
    assert (done.code, done.killed) == (0, True)


@pytest.mark.usefixtures("_groups")
def test_a_kill_by_somebody_else_is_not_the_ceilings() -> None:
    done = ceiling.run(["sh", "-c", "kill -9 $$"], 100 * MIB)
    assert (done.code, done.killed) == (-9, False)


@pytest.mark.usefixtures("_groups")
def test_page_cache_counts_where_the_file_was_dropped_first(file: Path) -> None:
    """The defect: pages that were in the cache already cost a group nothing."""
    command = [sys.executable, "-c", READ, str(file)]
    warm, _ = ceiling.run(command, 64 * MIB), page_cache.drop([file])
    cold = ceiling.run(command, 64 * MIB)
    assert warm.peak_nbytes is not None
    assert cold.peak_nbytes is not None
    assert cold.peak_nbytes - warm.peak_nbytes > 6 * MIB
    assert cold.read_nbytes - warm.read_nbytes >= 8 * MIB - 4 * MIB


@pytest.mark.usefixtures("_groups")
def test_who_takes_too_long_is_ended_with_all_it_started() -> None:
    """One left the process group; the memory group still has it."""
    done = ceiling.run(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & sleep 1000"], 64 * MIB, seconds=0.3)
    assert (done.late, done.killed) == (True, False)


@pytest.mark.usefixtures("_groups")
def test_the_command_line_keeps_the_exit_code() -> None:
    command = [sys.executable, CEILING, "64MiB", "sh", "-c", "echo said; exit 3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "said\n")
    assert "GiB under 0.062" in done.stderr


@pytest.mark.usefixtures("_groups")
def test_a_command_line_that_is_told_to_end_leaves_no_group_and_no_process() -> None:
    command = [sys.executable, CEILING, "64MiB", "sh", "-c", "echo $$; exec sleep 1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert ours(process.pid)
        process.terminate()
        assert process.wait() == 128 + signal.SIGTERM
        assert not ours(process.pid)
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
