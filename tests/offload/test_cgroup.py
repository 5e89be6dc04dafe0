"""Memory limits (`offload/memory.py`) are the least over every visible cgroup ancestor: sixteen trees of files, as
kernels show them.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from moedge.offload.memory import host_available, host_total, memory_groups

MIB = 1 << 20
V1 = "33 32 0:30 {root} /sys/fs/cgroup/memory rw shared:1 - cgroup cgroup rw,memory"
V2 = "34 32 0:31 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate"
V2_BESIDE_V1 = "35 32 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
CPU = "36 32 0:33 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
SENTINEL = "9223372036854771712"


class Tree:
    """Files under a folder that stands for `/`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def process(self, cgroup: str, *mounts: str) -> None:
        self.write("proc/self/cgroup", cgroup)
        self.write("proc/self/mountinfo", "\n".join(("21 1 8:1 / / rw - ext4 /dev/sda1 rw", *mounts)))

    def v2(self, folder: str, used: int = 0, **limits: str) -> None:
        """`limits` are file names without `memory.`, such as max='1048576'."""
        self.write(f"{folder}/memory.current", str(used))
        for name, value in limits.items():
            self.write(f"{folder}/memory.{name}", value)

    def v1(self, folder: str, limit: str, used: int = 0, stat: str = "") -> None:
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", str(used))
        self.write(f"{folder}/memory.stat", stat)


def size(mib: int) -> str:
    return str(mib * MIB)


def lines(stat: dict[str, int]) -> str:
    return "\n".join(f"{name} {size(mib)}" for name, mib in stat.items())


TREES: dict[str, tuple[Callable[[Tree], None], tuple[int, int] | None]] = {}


def tree(total: int | None, available: int = 0) -> Callable[[Callable[[Tree], None]], Callable[[Tree], None]]:
    """Registers a tree with the total and the available MiB that it leaves; None if it limits nothing."""

    def register(build: Callable[[Tree], None]) -> Callable[[Tree], None]:
        TREES[build.__name__] = (build, None if total is None else (total, available))
        return build

    return register


@tree(100, 70)
def v2_own_group(t: Tree) -> None:
    t.process("0::/app", V2.format(root="/"))
    t.v2("sys/fs/cgroup/app", 30 * MIB, max=size(100), high="max")


@tree(None)
def v2_without_limit(t: Tree) -> None:
    t.process("0::/app", V2.format(root="/"))
    t.v2("sys/fs/cgroup/app", 30 * MIB, max="max", high="max")


@tree(60, 10)
def v2_parent_is_tighter(t: Tree) -> None:
    t.process("0::/pod/app", V2.format(root="/"))
    t.v2("sys/fs/cgroup/pod/app", 30 * MIB, max=size(100))
    t.v2("sys/fs/cgroup/pod", 50 * MIB, max=size(60))


@tree(40, 10)
def v2_child_is_tighter(t: Tree) -> None:
    t.process("0::/pod/app", V2.format(root="/"))
    t.v2("sys/fs/cgroup/pod/app", 30 * MIB, max=size(40))
    t.v2("sys/fs/cgroup/pod", 50 * MIB, max=size(100))


@tree(50, 5)
def v2_total_and_room_come_from_different_groups(t: Tree) -> None:
    t.process("0::/pod/app", V2.format(root="/"))
    t.v2("sys/fs/cgroup/pod/app", 10 * MIB, max=size(50))
    t.v2("sys/fs/cgroup/pod", 95 * MIB, max=size(100))


@tree(80, 50)
def v2_high_is_below_max(t: Tree) -> None:
    t.process("0::/app", V2.format(root="/"))
    t.v2("sys/fs/cgroup/app", 30 * MIB, max=size(100), high=size(80))


@tree(100, 70)
def v2_swap_limits_are_ignored(t: Tree) -> None:
    t.process("0::/app", V2.format(root="/"))
    t.v2("sys/fs/cgroup/app", 30 * MIB, max=size(100))
    t.write("sys/fs/cgroup/app/memory.swap.max", "0")
    t.write("sys/fs/cgroup/app/memory.swap.high", size(1))


@tree(100, 70)
def v2_namespace_shows_own_group_as_the_root(t: Tree) -> None:
    t.process("0::/", V2.format(root="/"))
    t.v2("sys/fs/cgroup", 30 * MIB, max=size(100))


@tree(100, 70)
def v2_container_without_namespace_mounts_its_group_alone(t: Tree) -> None:
    t.process("0::/docker/4f1a/app", V2.format(root="/docker/4f1a"))
    t.v2("sys/fs/cgroup/app", 30 * MIB, max="max")
    t.v2("sys/fs/cgroup", 30 * MIB, max=size(100))


@tree(100, 70)
def v2_mount_from_outside_the_namespace(t: Tree) -> None:
    """The mount's root reads `/..`, so nothing says how own path and mount belong together but the folder's name."""
    t.process("0::/app", V2.format(root="/../.."))
    t.v2("sys/fs/cgroup/app", 30 * MIB, max=size(100))


@tree(100, 70)
def v1_own_group(t: Tree) -> None:
    t.process("5:cpu,cpuacct:/other\n4:memory:/app", CPU, V1.format(root="/"))
    t.v1("sys/fs/cgroup/memory/app", size(100), 30 * MIB)
    t.v1("sys/fs/cgroup/memory", SENTINEL, 900 * MIB)


@tree(None)
def v1_sentinel_is_no_limit(t: Tree) -> None:
    t.process("4:memory:/app", V1.format(root="/"))
    t.v1("sys/fs/cgroup/memory/app", SENTINEL, 30 * MIB, f"hierarchical_memory_limit {SENTINEL}")
    t.v1("sys/fs/cgroup/memory", SENTINEL)


@tree(90, 60)
def v1_hidden_ancestor_is_tighter(t: Tree) -> None:
    t.process("4:memory:/kubepods/pod7/app", V1.format(root="/kubepods/pod7/app"))
    t.v1("sys/fs/cgroup/memory", size(100), 30 * MIB, f"hierarchical_memory_limit {size(90)}")


@tree(100, 70)
def hybrid_limits_in_v1(t: Tree) -> None:
    t.process("4:memory:/a/b\n0::/", V1.format(root="/"), V2_BESIDE_V1)
    t.v1("sys/fs/cgroup/memory/a/b", size(100), 30 * MIB)
    t.write("sys/fs/cgroup/unified/cgroup.procs", "1")


@tree(100, 70)
def mount_point_with_a_space(t: Tree) -> None:
    t.process("0::/app", V2.format(root="/").replace("/sys/fs/cgroup", "/mnt/c\\040g"))
    t.v2("mnt/c g/app", 30 * MIB, max=size(100))


@tree(100, 70)
def page_cache_is_room(t: Tree) -> None:
    t.process("0::/app", V2.format(root="/"))
    t.v2("sys/fs/cgroup/app", 95 * MIB, max=size(100))
    stat = {"anon": 20, "inactive_file": 40, "active_file": 35, "file_mapped": 10, "shmem": 9}
    t.write("sys/fs/cgroup/app/memory.stat", lines(stat))


@tree(100, 40)
def v1_page_cache_of_children_is_room(t: Tree) -> None:
    t.process("4:memory:/app", V1.format(root="/"))
    stat = {"inactive_file": 1, "total_inactive_file": 30, "total_active_file": 20, "total_mapped_file": 10}
    t.v1("sys/fs/cgroup/memory/app", size(100), 100 * MIB, lines(stat))


@tree(None)
def no_cgroup_files(t: Tree) -> None:
    t.write("proc/self/status", "")


@tree(None)
def cgroup_that_is_not_mounted(t: Tree) -> None:
    t.process("0::/app")


@tree(100, 70)
def own_folder_is_gone(t: Tree) -> None:
    t.process("0::/pod/app", V2.format(root="/"))
    t.v2("sys/fs/cgroup/pod", 30 * MIB, max=size(100))


@tree(100, 70)
def unreadable_limit_leaves_the_others(t: Tree) -> None:
    t.process("0::/pod/app", V2.format(root="/"))
    (t.root / "sys/fs/cgroup/pod/app/memory.max").mkdir(parents=True)
    t.v2("sys/fs/cgroup/pod", 30 * MIB, max=size(100))


@tree(100, 100)
def unknown_usage_leaves_the_limit(t: Tree) -> None:
    t.process("0::/app", V2.format(root="/"))
    t.write("sys/fs/cgroup/app/memory.max", size(100))


@tree(100, 0)
def usage_above_the_limit_leaves_nothing(t: Tree) -> None:
    t.process("0::/app", V2.format(root="/"))
    t.v2("sys/fs/cgroup/app", 130 * MIB, max=size(200), high=size(100))


@pytest.mark.parametrize("name", TREES)
def test_the_tightest_group_binds(name: str, tmp_path: Path) -> None:
    """Case M4 of the failure table."""
    build, expected = TREES[name]
    build(Tree(tmp_path))
    if expected is None:
        assert memory_groups(tmp_path) == []
        assert host_total(tmp_path) > 200 * MIB
    else:
        assert (host_total(tmp_path) // MIB, host_available(tmp_path) // MIB) == expected


def test_the_same_hierarchy_mounted_twice_counts_once(tmp_path: Path) -> None:
    t = Tree(tmp_path)
    t.process("0::/app", V2.format(root="/"), V2.format(root="/"))
    t.v2("sys/fs/cgroup/app", 30 * MIB, max=size(100))
    assert [group.headroom for group in memory_groups(tmp_path)] == [70 * MIB]


def test_a_path_that_leaves_the_namespace_reads_nothing_outside_the_mount(tmp_path: Path) -> None:
    t = Tree(tmp_path)
    t.process("0::/../sibling", V2.format(root="/"))
    t.v2("sys/fs/sibling", 0, max=size(1))
    t.v2("sys/fs/cgroup", 30 * MIB, max=size(100))
    assert host_total(tmp_path) == 100 * MIB
