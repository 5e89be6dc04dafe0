"""Hashes of full blocks, each over everything that its keys and values depend on.

A block's keys and values follow from its tokens, all tokens before them, and the settings that every sequence of a
cache shares. So a block's hash is taken over the hash of the block before it and its own tokens, and the first one's
predecessor is a hash of the settings. 128 bits: two of 2**40 blocks collide with a probability of 2**-49.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from hashlib import blake2b

HASH_NBYTES = 16

# The token ids of a sequence at positions begin to end.
TokenSource = Callable[[int, int], list[int]]


def root_hash(*settings: object) -> bytes:
    """The hash before the first block: model, formats, precision, whatever changes what is computed."""
    return blake2b(repr(settings).encode(), digest_size=HASH_NBYTES, person=b"moedge.kv").digest()


def extend_chain(hashes: list[bytes], root: bytes, tokens: TokenSource, block: int, num_blocks: int) -> None:
    """Appends the hashes of full blocks until there are `num_blocks`."""
    for index in range(len(hashes), num_blocks):
        ids = array("q", tokens(index * block, (index + 1) * block))
        before = hashes[-1] if hashes else root
        hashes.append(blake2b(before + ids.tobytes(), digest_size=HASH_NBYTES).digest())
