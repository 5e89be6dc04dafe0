"""Fuzzed headers (`offload/checkpoint/header.py`): what is accepted covers the file once and is accepted by the library
too; all else is refused.
"""

import struct

import pytest
from safetensors import SafetensorError, deserialize

from support.hostile.headers import KINDS, header_outcome, make_header

NUM_HEADERS = 5_000


def library_accepts(header: bytes, file_nbytes: int) -> bool:
    file = struct.pack("<Q", len(header)) + header
    try:
        deserialize(file + bytes(file_nbytes - len(file)))
    except SafetensorError:
        return False
    return True


def test_no_header_raises_anything_but_a_refusal_and_what_is_accepted_holds() -> None:
    accepted = dict.fromkeys(KINDS, 0)
    for seed in range(NUM_HEADERS):
        kind, header, file_nbytes = make_header(seed)
        if header_outcome(header, file_nbytes):
            accepted[kind] += 1
            assert library_accepts(header, file_nbytes), header
        else:
            assert kind != "good", header
    assert accepted["good"] == NUM_HEADERS // len(KINDS)
    # Not everything that was changed is damage: some of it must pass.
    assert accepted["changed bytes"]


@pytest.mark.parametrize("dropped", range(1, 40))
def test_a_good_header_cut_anywhere_is_refused(dropped: int) -> None:
    _, header, file_nbytes = make_header(3)
    assert header_outcome(header, file_nbytes)
    assert not header_outcome(header[:-dropped], file_nbytes)
