"""Routing counts of the jobs of a store, kept beside its weights: the next job starts with them, whoever runs it.

They are advisory: without them, or if they cannot be read, a job starts from zero and generates the same tokens.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from ...offload.atomic_file import TEMPORARY_SUFFIX, write_atomically

FILE = "note-routing.safetensors"
VERSION = "1"
# Earlier jobs count for at most this many tokens, so that the profile follows what the store is used for.
MAX_TOKENS = 1e6

Profile = dict[str, torch.Tensor]


def profile_shapes(num_experts: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the counts of each layer with experts: `chosen` and `tokens`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, count in enumerate(num_experts):
        if count:
            shapes |= {f"layers.{layer}.chosen": (count,), f"layers.{layer}.tokens": (1,)}
    return shapes


def kept(store: Path, wanted: Mapping[str, tuple[int, ...]]) -> Profile:
    """The counts of a store if they have the names and shapes `wanted`; else none."""
    path = store / FILE
    try:
        with safe_open(path, "pt") as file:
            version = (file.metadata() or {}).get("version")
        tensors = load_file(path)
    except (SafetensorError, OSError):
        return {}
    sound = all(bool(tensor.isfinite().all()) and bool((tensor >= 0).all()) for tensor in tensors.values())
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return tensors if version == VERSION and sound and shapes == dict(wanted) else {}


def merge(store: Path, observed: Profile) -> None:
    """Adds the counts that a job `observed` to those of the store, under a lock: jobs may end at the same time.

    Raises OSError where the store cannot be written to.
    """
    with _locked(store):
        before = kept(store, {name: tuple(tensor.shape) for name, tensor in observed.items()})
        merged = {name: tensor + _decayed(before, name) for name, tensor in observed.items()}
        with suppress(FileNotFoundError):
            # A process that was killed here left it; with the lock held, no other one uses it.
            os.unlink(store / f".{FILE}{TEMPORARY_SUFFIX}")
        write_atomically(store / FILE, save(merged, {"version": VERSION}))


def _decayed(before: Profile, name: str) -> torch.Tensor | float:
    if name not in before:
        return 0.0
    tokens = float(before[f"{name.rsplit('.', 1)[0]}.tokens"])
    return before[name] * min(1.0, MAX_TOKENS / max(tokens, 1.0))


@contextmanager
def _locked(store: Path) -> Iterator[None]:
    """Locks the folder itself: the store's own lock is shared by all its users."""
    descriptor = os.open(store, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
