"""Codes to numbers by byte permutes (`quant/kernels/decode.py`): the assembly, run here instruction by instruction,
gives the numbers of the tables for all bytes, at every place of a word.
"""

import re
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

from moedge.quant.formats import mxfp4, nf4, vq2
from moedge.quant.kernels import decode
from moedge.quant.tensor import pack

MASK = 0xFFFFFFFF


def prmt(a: int, b: int, selector: int) -> int:
    """PTX ISA, prmt: four bytes of eight by four bits each, of which the highest repeats the byte's sign."""
    eight = [a >> 8 * at & 255 for at in range(4)] + [b >> 8 * at & 255 for at in range(4)]
    found = 0
    for at in range(4):
        nibble = selector >> 4 * at & 15
        byte = eight[nibble & 7]
        found |= (255 * (byte >> 7) if nibble & 8 else byte) << 8 * at
    return found


def lop3(a: int, b: int, c: int, table: int) -> int:
    """PTX ISA, lop3: the bit of the table at the three bits."""
    return sum((table >> (4 * (a >> at & 1) + 2 * (b >> at & 1) + (c >> at & 1)) & 1) << at for at in range(32))


def fma(a: int, b: int, c: int) -> int:
    """PTX ISA, fma.rn.bf16x2; numbers here are such that products in float32 are exact."""
    one, two, three = (np.array([x & 0xFFFF, x >> 16], np.uint32) << 16 for x in (a, b, c))
    sums = torch.from_numpy(one.view(np.float32) * two.view(np.float32) + three.view(np.float32))
    low, high = (int(bits) & 0xFFFF for bits in sums.to(torch.bfloat16).view(torch.int16))
    return high << 16 | low


def sub(a: int, b: int) -> int:
    """PTX ISA, sub.rn.f16x2."""
    one, two = (np.array([x & 0xFFFF, x >> 16], np.uint16).view(np.float16) for x in (a, b))
    low, high = (int(bits) for bits in (one - two).view(np.uint16))
    return high << 16 | low


OPERATIONS: dict[str, Callable[..., int]] = {
    "and": lambda a, b: a & b,
    "mov": lambda a: a,
    "shl": lambda a, b: a << b & MASK,
    "shr": lambda a, b: a >> b,
    "xor": lambda a, b: a ^ b,
    "sub": sub,
    "prmt": prmt,
    "lop3": lop3,
    "fma": fma,
}


def run(assembly: str, results: int, *inputs: int) -> list[int]:
    """The result operands of a block of assembly, whose inputs are the operands behind them."""
    registers = {f"${results + at}": value for at, value in enumerate(inputs)}
    for line in assembly.strip("{} ").split(";"):
        if not (words := re.findall(r"[\w.$]+", line)) or words[0] == ".reg":
            continue
        operation, target, *operands = words
        values = [registers[each] if each in registers else int(each, 0) for each in operands]
        registers[target] = OPERATIONS[operation.split(".")[0]](*values)
    return [registers[f"${at}"] for at in range(results)]


def numbers(*words: int, dtype: torch.dtype = torch.bfloat16) -> list[float]:
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.tensor(halves).to(torch.int16).view(dtype).tolist()


def words_of(codes: str) -> list[int]:
    """As the kernel's inputs have them: each word once for each of the four codes of its operand."""
    table = decode.table(codes, torch.bfloat16, "cpu", interpreted=False)
    assert table is not None
    words = table[: 32 * len(decode.WORDS[codes])].view(-1, 32)
    return [int(word) & MASK for word in words[:, :1].expand(-1, 4).reshape(-1)]


WORDS = [at | at + 1 << 8 | at + 2 << 16 | at + 3 << 24 for at in range(0, 256, 4)]
# Each byte at the other places of a word, too.
WORDS += [(word << 8 | word >> 24) & MASK for word in WORDS]
PAIRS = {
    "nf4": (decode.NF4_ASM, [float(torch.tensor(level).bfloat16()) for level in nf4.LEVELS]),
    "e2m1": (decode.E2M1_ASM, list(mxfp4.LEVELS)),
    "int4": (decode.INT4_ASM, [128.0 + code for code in range(16)]),
}


@pytest.mark.parametrize("codes", PAIRS)
def test_pairs_of_codes(codes: str) -> None:
    assembly, levels = PAIRS[codes]
    inputs = [] if codes == "int4" else words_of(codes)
    for word in WORDS:
        low0, low1, high0, high1 = run(assembly.value, 4, word, *inputs)
        codes_of = list(word.to_bytes(4, "little"))
        assert numbers(low0, low1) == [levels[each & 15] for each in codes_of]
        assert numbers(high0, high1) == [levels[each >> 4] for each in codes_of]


@pytest.mark.parametrize("group", range(4))
def test_codes_of_three_bits(group: int) -> None:
    """Any bytes of lower bits beside any of upper ones."""
    rest = np.random.default_rng(group).permutation(WORDS)
    for low, high in zip(WORDS, map(int, rest), strict=True):
        even0, even1, odd0, odd1 = run(decode.INT3_ASM.value[group], 4, low, *words_of("int3"), high)
        both = list(zip(low.to_bytes(4, "little"), high.to_bytes(4, "little"), strict=True))
        for half, found in ((0, (even0, even1)), (4, (odd0, odd1))):
            codes = [x >> half + group % 2 * 2 & 3 | (y >> half + group & 1) << 2 for x, y in both]
            assert numbers(*found) == [code - 4.0 for code in codes]


@pytest.mark.parametrize("behind", range(2))
@pytest.mark.parametrize("seed", range(4))
def test_points_of_pairs(seed: int, behind: int) -> None:
    """Any bytes of two lower codes beside any of upper bits: the first numbers of both pairs, then the second ones."""
    rest = np.random.default_rng(seed).permutation(WORDS)
    for low, high in zip(WORDS, map(int, rest), strict=True):
        found = run(decode.VQ2_ASM.value[behind], 8, low, *words_of("vq2"), high)
        for pair in range(2):
            wanted = []
            for x, y in zip(low.to_bytes(4, "little"), high.to_bytes(4, "little"), strict=True):
                point = vq2.POINTS[x >> 4 * pair & 15]
                above = y >> 6 - 2 * behind + pair & 1
                wanted.append(point if point >> 7 == above else 255 - point)
            assert numbers(*found[2 * pair : 2 * pair + 2]) == [float(each % 16 - 8) for each in wanted]
            assert numbers(*found[4 + 2 * pair : 6 + 2 * pair]) == [float(each // 16 - 8) for each in wanted]


def raised(word: int, at: int, places: int) -> int:
    """Four bytes of upper bits as the kernel raises them, for the four bytes of 16 that begin at 4 * `at`."""
    table = decode.table("vq2", torch.bfloat16, "cpu", interpreted=False)
    assert table is not None
    mask = int(table[128 + (4 if places == 2 else 0) + at]) & MASK
    return run(decode.RAISE_ASM.value[places // 4], 1, word, mask)[0]


@pytest.mark.parametrize("groups", [1, 2])
def test_a_row_of_pairs_has_the_bits_of_the_codec(groups: int) -> None:
    """As the kernel reads it, 16 bytes a group, then those of upper bits, which groups share."""
    packed = pack(torch.randn(3, 64 * groups, generator=torch.Generator().manual_seed(2)).bfloat16(), "vq2")
    codes, wanted = packed.planes[0].numpy(), packed.dequantize()
    for row in range(3):
        for group, at in product(range(groups), range(4)):
            low, high = (
                int.from_bytes(codes[row, begin : begin + 4].tobytes(), "little")
                for begin in (16 * group + 4 * at, 16 * groups + 4 * (at % groups))
            )
            high = raised(high, at, 4)
            high = raised(high, at, 2) if groups == 1 else high
            points = run(decode.VQ2_ASM.value[groups - 1 - group], 8, low, *words_of("vq2"), high)
            scale = float(packed.planes[1][row, group])
            factor, half = (two_of(number) for number in (scale, scale / 2))
            found = [numbers(*(fma(word, factor, half) for word in points[part : part + 2])) for part in range(0, 8, 2)]
            # First weights of the first and of the second pair of four bytes, then second weights.
            for part, column in enumerate((0, 1, 4, 5)):
                columns = [64 * group + 16 * at + 8 * (byte // 2) + 2 * (byte % 2) + column for byte in range(4)]
                assert found[part] == wanted[row, columns].tolist()


def two_of(number: float) -> int:
    """A number twice, as bfloat16."""
    bits = int(torch.tensor(number).bfloat16().view(torch.int16)) & 0xFFFF
    return bits << 16 | bits


@pytest.mark.parametrize("places", [2, 4])
def test_upper_bits_of_pairs_that_share_bytes(places: int) -> None:
    """Of 16 pairs in the first of every two halves: of four bytes or of eight. What is above a byte's end counts."""
    for at in range(4):
        shift = 0 if at // (places // 2) % 2 else places
        for word in WORDS:
            found = raised(word, at, places)
            wanted = [byte << shift & 255 for byte in word.to_bytes(4, "little")]
            kept = 255 << places & 255 if shift else 255
            assert [byte & kept for byte in found.to_bytes(4, "little")] == wanted


def test_integers_of_eight_bits() -> None:
    for word in WORDS:
        wanted = np.frombuffer(word.to_bytes(4, "little"), np.int8).astype(float).tolist()
        assert numbers(*run(decode.INT8_ASM.value, 2, word)) == wanted


@pytest.mark.parametrize("offset", [True, False])
def test_codes_of_keys_and_values_in_float16(offset: bool) -> None:
    """As they are, or plus what the kernel takes from products."""
    bytes8 = (decode.OFFSET_INT8_ASM if offset else decode.HALF_INT8_ASM).value
    pairs = (decode.OFFSET_INT4_ASM if offset else decode.HALF_INT4_ASM).value
    more8, more4 = (decode.OFFSET_INT8.value, decode.OFFSET_INT4.value) if offset else (0, 0)
    for word in WORDS:
        codes = word.to_bytes(4, "little")
        wanted = [int(each) + more8 for each in np.frombuffer(codes, np.int8)]
        assert numbers(*run(bytes8, 2, word), dtype=torch.float16) == wanted
        low0, low1, high0, high1 = run(pairs, 4, word)
        assert numbers(low0, low1, dtype=torch.float16) == [(each & 15) + more4 for each in codes]
        assert numbers(high0, high1, dtype=torch.float16) == [(each >> 4) + more4 for each in codes]


def test_a_wrong_permute_is_found() -> None:
    wrong = decode.NF4_ASM.value.replace("0x6240", "0x6250", 1)
    assert run(wrong, 4, WORDS[7], *words_of("nf4")) != run(decode.NF4_ASM.value, 4, WORDS[7], *words_of("nf4"))
