"""Profiles of this machine between runs: one small file, believed only where it fits the hardware found. Torch-free."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from platformdirs import user_state_path

from .hardware import Hardware, find_hardware
from .profile import Machine

SCHEMA = "moedge.machine/1"
# Several disks, and several machines that share a home folder, take turns.
_MOST_KEPT = 8


def saved_path() -> Path:
    return user_state_path("moedge") / "machine.json"


def this_machine(
    folder: Path, measure: Callable[[Hardware], Machine], again: bool = False, path: Path | None = None
) -> Machine:
    """The saved profile of this hardware and of the disk of `folder`; measured and saved if there is none.

    `again` measures in any case; `path` is where profiles are kept, `saved_path()` if not given.
    """
    hardware, path = find_hardware(folder), path or saved_path()
    saved = None if again else load_machine(hardware, path)
    if saved is None:
        saved = measure(hardware)
        try:
            save_machine(saved, path)
        except OSError as error:
            warnings.warn(f"{path} cannot be written ({error}): the machine is measured again next time", stacklevel=2)
    return saved


def read_machine(path: Path) -> Machine:
    """The first profile of a file such as `moedge doctor --json` prints, of this machine or another.

    Raises ValueError if there is none in it, OSError if it cannot be read.
    """
    path.open().close()
    machines = _kept(path)
    if not machines:
        raise ValueError(f"{path} holds no undamaged profile; `moedge doctor --json` prints one ({SCHEMA})")
    return machines[0]


def load_machine(hardware: Hardware, path: Path) -> Machine | None:
    """None where no undamaged profile of this hardware is kept."""
    return next((machine for machine in _kept(path) if machine.hardware == hardware), None)


def save_machine(machine: Machine, path: Path) -> None:
    """Replaces the profile of the same hardware; killed at any point, the file is the old one or the new one."""
    others = [kept for kept in _kept(path) if kept.hardware != machine.hardware]
    profiles = [kept.to_json() for kept in (machine, *others)][:_MOST_KEPT]
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            json.dump({"schema": SCHEMA, "machines": profiles}, file, indent=1)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _kept(path: Path) -> list[Machine]:
    """Undamaged profiles, newest first. A damaged one is as good as none: it is measured again."""
    machines = []
    for content in _contents(path):
        try:
            machines.append(Machine.from_json(content))
        except ValueError:
            continue
    return machines


def _contents(path: Path) -> list[Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    known = isinstance(document, dict) and document.get("schema") == SCHEMA
    machines = document.get("machines") if known else None
    return machines if isinstance(machines, list) else []
