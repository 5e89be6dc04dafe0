"""The routing statistics of earlier jobs, kept beside a store's weights: the next job starts with them.

They only save time: without them, or where they cannot be read, a job starts from zero and gives the same tokens.
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

from ...moe.routing_stats import Affinity
from ...offload.atomic_file import TEMPORARY_SUFFIX, write_atomically

FILE = "note-routing.safetensors"
VERSION = "1"
# Earlier jobs together count for at most this many tokens, so that a store follows what it is used for.
MAX_TOKENS = 1e6

Profile = dict[str, torch.Tensor]


def profile_shapes(num_experts: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the counts: `chosen` and `tokens` by layer, `follows` where a layer precedes."""
    counts = {layer: count for layer, count in enumerate(num_experts) if count}
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, count in counts.items():
        shapes |= {f"layers.{layer}.chosen": (count,), f"layers.{layer}.tokens": (1,)}
    return shapes | {f"layers.{layer}.follows": shape for layer, shape in Affinity.shapes(counts).items()}


def kept(store: Path, wanted: Mapping[str, tuple[int, ...]]) -> Profile:
    """The counts in the store's file; none unless they have the names and shapes `wanted`."""
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
    """Adds a job's counts to the file under a lock, so that of two jobs that end together both are counted.

    Raises OSError where the store cannot be written to.
    """
    with _locked(store):
        before = kept(store, {name: tuple(tensor.shape) for name, tensor in observed.items()})
        merged = {name: tensor + _aged(before, name) for name, tensor in observed.items()}
        with suppress(FileNotFoundError):
            # Left by a process that was killed here; no other process uses it while we have the lock.
            os.unlink(store / f".{FILE}{TEMPORARY_SUFFIX}")
        write_atomically(store / FILE, save(merged, {"version": VERSION}))


def _aged(before: Profile, name: str) -> torch.Tensor | float:
    if name not in before:
        return 0.0
    tokens = float(before[f"{name.rsplit('.', 1)[0]}.tokens"])
    return before[name] * min(1.0, MAX_TOKENS / max(tokens, 1.0))


@contextmanager
def _locked(store: Path) -> Iterator[None]:
    """Locks the folder itself, because the store's own lock is shared by all its users."""
    descriptor = os.open(store, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
