"""Random seeds from names instead of positions, so that reordering a file changes no answer."""

from __future__ import annotations

from hashlib import blake2b


def row_seed(job_seed: int, row_id: str) -> int:
    """63 bits for a row that names no seed: equal prompts under different ids get different samples."""
    return _hash63(f"{job_seed}:{row_id}", b"moedge.row")


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one choice of a row; the first choice uses the row's seed as it is."""
    return seed if choice == 0 else _hash63(f"{seed}:{choice}", b"moedge.choice")


def _hash63(text: str, purpose: bytes) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8, person=purpose).digest()) >> 1
