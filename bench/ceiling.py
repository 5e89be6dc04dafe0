"""Runs a command in a memory cgroup of its own: all that it and the page cache of its files take counts.

python bench/ceiling.py 4GiB COMMAND...        # needs root, or a delegated cgroup
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from moedge.offload.budget import parse_size

ROOTS = (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"))


def under_ceiling(command: list[str], ceiling: str | None) -> list[str]:
    """The command that runs `command` with at most `ceiling` of memory; itself where there is none."""
    return command if ceiling is None else [sys.executable, str(Path(__file__)), ceiling, *command]


def make_group(nbytes: int) -> Path:
    for root, limit in ROOTS:
        if (Path(root) / "cgroup.procs").exists():
            group = Path(root) / f"ceiling-{os.getpid()}"
            group.mkdir()
            if (group / limit).exists():
                (group / limit).write_text(str(nbytes))
                return group
            group.rmdir()
    raise SystemExit("no memory controller was found that can be written: run as root, or without a ceiling")


def main() -> None:
    group = make_group(parse_size(sys.argv[1], 0, 0))
    try:
        enter = f'echo $$ > {group / "cgroup.procs"} && exec "$@"'
        raise SystemExit(subprocess.run(["sh", "-c", enter, "sh", *sys.argv[2:]], check=False).returncode)
    finally:
        group.rmdir()


if __name__ == "__main__":
    main()
