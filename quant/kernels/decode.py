"""Codes of weights to numbers, in registers. Imports Triton.

Numbers in bfloat16 come from byte permutes (PTX's prmt), four codes at a time, and are scaled two at a time; both are
inline assembly, which Triton's interpreter cannot run. Other dtypes, and the interpreter, take the same numbers from a
table, or from arithmetic. `tests/quant/test_decode.py` runs the assembly on all bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..formats import int3, mxfp4, nf4, vq2

# Indices into four bytes, of which two are the halves of a number: of the 1st and 3rd of four codes, and of the others.
_FIRST, _SECOND = "0x6240", "0x7351"


def byte_tables(levels: Sequence[float]) -> list[int]:
    """The bits of levels as bfloat16, as words of four bytes each: first their low bytes, then their high ones."""
    bits = torch.tensor(levels, dtype=torch.bfloat16).view(torch.int16).tolist()
    low, high = [each & 255 for each in bits], [each >> 8 & 255 for each in bits]
    return [int.from_bytes(half[at : at + 4], "little") for half in (low, high) for at in range(0, len(bits), 4)]


# Of each point and its opposite the one whose second coordinate is below 0: its byte's highest bit is 0.
_BELOW = [min(point, point ^ 0xFF) for point in vq2.POINTS]
# Both coordinates of all, four bits each, from the highest ones on.
_FIRSTS, _SECONDS = (
    tl.constexpr(sum((point >> shift & 15) << 60 - 4 * at for at, point in enumerate(_BELOW))) for shift in (0, 4)
)
# The words that permutes of each type of codes read. Magnitudes are enough where a bit is the sign; the last word is
# what masks are made of.
WORDS = {
    "nf4": [*byte_tables(nf4.LEVELS), 0x0000FF00],
    "e2m1": [*byte_tables(mxfp4.MAGNITUDES), 0x80808080],
    "int3": byte_tables(int3.LEVELS),
    "vq2": [int.from_bytes(_BELOW[at : at + 4], "little") for at in range(0, len(_BELOW), 4)],
}
# What others than bfloat16 are looked up in; beside these they are computed.
LEVELS = {"nf4": nf4.LEVELS, "e2m1": mxfp4.LEVELS}
_WARP = 32
# All bits where upper bits of 16 bytes are shifted (raise_bits), by 4 places and by 2. They are loaded, because Triton
# decodes where tensor cores take numbers only what comes from memory.
RAISED = torch.tensor([255 * (pair & bit == 0) for bit in (8, 4) for pair in range(16)], dtype=torch.uint8)


def table(
    codes: str, dtype: torch.dtype, device: torch.device | str, interpreted: bool | None = None
) -> torch.Tensor | None:
    """What the kernel looks codes up in for activations of `dtype`; None if it computes them."""
    if dtype != torch.bfloat16 or (triton.knobs.runtime.interpret if interpreted is None else interpreted):
        return torch.tensor(LEVELS[codes], device=device) if codes in LEVELS else None
    if codes not in WORDS:
        return None
    words = torch.tensor(WORDS[codes], dtype=torch.int64).to(torch.int32)
    # Each word once for every thread of a warp: what all threads read from one address, the assembler keeps in uniform
    # registers, which prmt cannot read, and moves it every time.
    words = words.repeat_interleave(_WARP)
    return (torch.cat([words, RAISED.view(torch.int32)]) if codes == "vq2" else words).to(device)


def _asm(*lines: str) -> tl.constexpr:
    return tl.constexpr("{ .reg .b32 a, b, c, h, l, m, n, o, q, s, t; " + " ".join(f"{line};" for line in lines) + " }")


def _word(at: int, results: int = 4) -> str:
    """The operand that holds a word of a table: behind results and the codes, each word is there four times."""
    return f"${results + 1 + 4 * at}"


def _constraints(words: int, results: int = 4) -> tl.constexpr:
    return tl.constexpr(",".join(["=r"] * results + ["r"] * (1 + 4 * words)))


def _half(half: int, *lines: str) -> list[str]:
    """What gives four numbers, in `lines` their low bytes in l and their high ones in h."""
    return [*lines, f"prmt.b32 ${half}, l, h, {_FIRST}", f"prmt.b32 ${2 + half}, l, h, {_SECOND}"]


def _select(into: str, at: int) -> list[str]:
    """Four bytes by s of the words from `at` on: of the first two, or where m is set of the other two."""
    return [
        f"prmt.b32 a, {_word(at)}, {_word(at + 1)}, s",
        f"prmt.b32 b, {_word(at + 2)}, {_word(at + 3)}, s",
        # (b & m) | (a & ~m)
        f"lop3.b32 {into}, b, a, m, 0xe4",
    ]


_UPPER_HALF = ["shr.u32 s, s, 16", "shr.u32 t, t, 16"]
_MASK = [f"prmt.b32 m, {_word(8)}, 0, t", *_select("l", 0), *_select("h", 4)]
NF4_ASM = _asm(
    # s: the lower three bits of each code; t: the highest.
    *("and.b32 s, $4, 0x77777777", "shr.u32 t, $4, 3", "and.b32 t, t, 0x11111111"),
    *_half(0, *_MASK),
    *_half(1, *_UPPER_HALF, *_MASK),
)
NF4_OPERANDS = _constraints(9)

_SIGNED = [
    f"prmt.b32 l, {_word(0)}, {_word(1)}, s",
    f"prmt.b32 h, {_word(2)}, {_word(3)}, s",
    # Where the fourth bit of a code is set, prmt repeats the sign of the byte: 0xff instead of 0x80.
    *(f"prmt.b32 m, {_word(4)}, 0x80808080, t", "shl.b32 m, m, 7", "lop3.b32 h, m, 0x80808080, h, 0xea"),
]
E2M1_ASM = _asm(
    *("and.b32 s, $4, 0x77777777", "mov.b32 t, $4"),
    *_half(0, *_SIGNED),
    *_half(1, *_UPPER_HALF, *_SIGNED),
)
E2M1_OPERANDS = _constraints(5)

# As its index, each level of three bits is one of eight bytes.
_EIGHT = [f"prmt.b32 l, {_word(0)}, {_word(1)}, s", f"prmt.b32 h, {_word(2)}, {_word(3)}, s"]


def _int3_asm(group: int) -> str:
    """Of bytes with the lower bits of two groups and bytes with the upper ones of four, the numbers of one group."""
    low = f"shr.u32 s, $4, {group % 2 * 2}"
    high = f"shl.b32 t, {_word(4)}, {2 - group}" if group < 2 else f"shr.u32 t, {_word(4)}, {group - 2}"
    # (t & 0x44444444) | s: the indices of eight columns.
    joined = (low, high, "and.b32 s, s, 0x33333333", "lop3.b32 s, t, 0x44444444, s, 0xea")
    assembly: str = _asm(*joined, *_half(0, *_EIGHT), *_half(1, "shr.u32 s, s, 16", *_EIGHT)).value
    return assembly


# By group.
INT3_ASM = tl.constexpr(tuple(_int3_asm(group) for group in range(4)))
INT3_OPERANDS = tl.constexpr(_constraints(4).value + ",r")


def _numbers_of(half: int, signs: str) -> list[str]:
    """Of codes in the lower half of s, and in q with their highest bits turned, both numbers of four points less a
    half: the 1st and 3rd point are of the first pair of a byte. A permute by a code whose highest bit is set repeats a
    sign, which no byte of a table has: of two permutes one gives 0. A half of a byte is the end of a mantissa from 128
    to 143."""
    both = ("prmt.b32 a, t, c, 0x4240", "prmt.b32 b, t, c, 0x4341")
    return [
        *(f"prmt.b32 a, {_word(0, 8)}, {_word(1, 8)}, s", f"prmt.b32 b, {_word(2, 8)}, {_word(3, 8)}, q"),
        *(f"prmt.b32 m, h, l, {signs}", "lop3.b32 m, a, b, m, 0x96", "and.b32 t, m, 0x0f0f0f0f", *both),
        *(f"fma.rn.bf16x2 ${half}, a, o, n", f"fma.rn.bf16x2 ${2 + half}, b, o, n"),
        *("shr.u32 m, m, 4", "and.b32 t, m, 0x0f0f0f0f", *both),
        *(f"fma.rn.bf16x2 ${4 + half}, a, o, n", f"fma.rn.bf16x2 ${6 + half}, b, o, n"),
    ]


def _vq2_asm(behind: int) -> str:
    """Of bytes with the lower bits of two pairs, and bytes with the upper ones before those of `behind` groups, which
    end the byte: first numbers of the first pair and of the second one, then second numbers, all less a half."""
    high = _word(4, 8)
    assembly: str = _asm(
        *("mov.b32 c, 0x43434343", "mov.b32 o, 0x3f803f80", "mov.b32 n, 0xc308c308"),
        # In the highest bit of a byte: the upper bit of its first pair, and of its second one.
        *(f"shl.b32 h, {high}, {2 * behind + 1}", f"shl.b32 l, {high}, {2 * behind}"),
        *("mov.b32 s, $8", "xor.b32 q, s, 0x88888888", *_numbers_of(0, "0xd9c8")),
        *("shr.u32 s, s, 16", "shr.u32 q, q, 16", *_numbers_of(1, "0xfbea")),
    ).value
    return assembly


# By the number of groups behind.
VQ2_ASM = tl.constexpr(tuple(_vq2_asm(behind) for behind in range(2)))
VQ2_OPERANDS = tl.constexpr(_constraints(4, 8).value + ",r")
# Of each byte the bits at its end, where the mask has the byte, moved up.
RAISE_ASM = tl.constexpr(
    tuple(_asm(f"shl.b32 a, $1, {places}", "lop3.b32 $0, a, $1, $2, 0xe4").value for places in (2, 4))
)

# 128 + code: a code is the end of the mantissa of a bfloat16 from 128 to 256.
_INTEGERS = ("prmt.b32 ${0}, t, c, 0x4140", "prmt.b32 ${1}, t, c, 0x4342")
INT4_ASM = _asm(
    *("mov.b32 c, 0x43434343", "and.b32 t, $4, 0x0f0f0f0f", *(each.format(0, 1) for each in _INTEGERS)),
    *("shr.u32 t, $4, 4", "and.b32 t, t, 0x0f0f0f0f", *(each.format(2, 3) for each in _INTEGERS)),
)
INT4_OPERANDS = _constraints(0)

# 128 and the lower seven bits, less 128, or 256 where the sign is set.
INT8_ASM = _asm(
    *("mov.b32 c, 0x43434343", "mov.b32 m, 0xbf80bf80", "and.b32 l, $2, 0x7f7f7f7f", "and.b32 h, $2, 0x80808080"),
    *("prmt.b32 a, l, c, 0x4140", "prmt.b32 b, h, c, 0x4140", "fma.rn.bf16x2 $0, b, m, a"),
    *("prmt.b32 a, l, c, 0x4342", "prmt.b32 b, h, c, 0x4342", "fma.rn.bf16x2 $1, b, m, a"),
)

# In float16 a byte is the end of a mantissa: 1024 + code, and 1152 + integer of 8 bits; less that, the numbers.
_HALVES = ("prmt.b32 ${0}, t, c, 0x4140", "prmt.b32 ${1}, t, c, 0x4342")
_LESS = "sub.rn.f16x2 ${0}, ${0}, m"
_HALF_INT8 = ("mov.b32 c, 0x64646464", "xor.b32 t, $2, 0x80808080", *(each.format(0, 1) for each in _HALVES))
_HALF_INT4 = (
    *("mov.b32 c, 0x64646464", "and.b32 t, $4, 0x0f0f0f0f", *(each.format(0, 1) for each in _HALVES)),
    *("shr.u32 t, $4, 4", "and.b32 t, t, 0x0f0f0f0f", *(each.format(2, 3) for each in _HALVES)),
)
OFFSET_INT8_ASM, OFFSET_INT4_ASM = _asm(*_HALF_INT8), _asm(*_HALF_INT4)
HALF_INT8_ASM = _asm(*_HALF_INT8, "mov.b32 m, 0x64806480", *(_LESS.format(at) for at in range(2)))
HALF_INT4_ASM = _asm(*_HALF_INT4, "mov.b32 m, 0x64006400", *(_LESS.format(at) for at in range(4)))
OFFSET_INT8, OFFSET_INT4 = tl.constexpr(1152), tl.constexpr(1024)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def load_table(table, S: tl.constexpr):
    """The words of a table, which stay in registers; for other dtypes than bfloat16 the table itself."""
    words = table
    if S.dtype == tl.bfloat16:
        if S.codes == "nf4":
            at = table + lane()
            low = (tl.load(at), tl.load(at + 32), tl.load(at + 64), tl.load(at + 96))
            high = (tl.load(at + 128), tl.load(at + 160), tl.load(at + 192), tl.load(at + 224))
            words = low + high + (tl.load(at + 256),)
        elif S.codes == "e2m1":
            at = table + lane()
            words = (tl.load(at), tl.load(at + 32), tl.load(at + 64), tl.load(at + 96), tl.load(at + 128))
        elif S.codes == "int3":
            at = table + lane()
            words = (tl.load(at), tl.load(at + 32), tl.load(at + 64), tl.load(at + 96))
        elif S.codes == "vq2":
            at = table + lane()
            masks = table.to(tl.pointer_type(tl.uint8), bitcast=True) + 512 + tl.arange(0, 16)[None, :]
            points = (tl.load(at), tl.load(at + 32), tl.load(at + 64), tl.load(at + 96))
            words = (points, tl.load(masks), tl.load(masks + 16))
    return words


@triton.jit
def lane():
    """The thread's place in its warp, as if it were one number."""
    zero = tl.zeros((1, 1), tl.int32)
    return tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r,r", [zero], tl.int32, is_pure=True, pack=1)


@triton.jit
def decode_pairs(pairs, table, S: tl.constexpr):
    """The numbers of the first and of the second code of every byte, in S.dtype; int4's plus 128."""
    low, high = pairs, pairs
    if S.dtype == tl.bfloat16:
        # Triton has no starred items.
        inputs = (pairs,) + table if S.codes != "int4" else (pairs,)  # noqa: RUF005
        if S.codes == "nf4":
            low, high = tl.inline_asm_elementwise(
                NF4_ASM, NF4_OPERANDS, inputs, (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        elif S.codes == "e2m1":
            low, high = tl.inline_asm_elementwise(
                E2M1_ASM, E2M1_OPERANDS, inputs, (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            low, high = tl.inline_asm_elementwise(
                INT4_ASM, INT4_OPERANDS, [pairs], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
    elif S.codes == "int4":
        low, high = (pairs & 15).to(S.dtype) + 128, (pairs >> 4).to(S.dtype) + 128
    else:
        low, high = tl.load(table + (pairs & 15)).to(S.dtype), tl.load(table + (pairs >> 4)).to(S.dtype)
    # The first of two weights in nf4 is in the high bits.
    if S.codes == "nf4":
        low, high = high, low
    return low, high


@triton.jit
def decode_threes(low, high, table, GROUP: tl.constexpr, S: tl.constexpr):
    """The numbers of even and of odd columns of one group, in S.dtype, from the bytes of their lower bits, which two
    groups share, and of their upper ones (formats/int3.py)."""
    if S.dtype == tl.bfloat16:
        ASM: tl.constexpr = INT3_ASM[GROUP]
        even, odd = tl.inline_asm_elementwise(
            ASM,
            INT3_OPERANDS,
            (low,) + table + (high,),  # noqa: RUF005
            (tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low >>= GROUP % 2 * 2
        high >>= GROUP
        even = ((low & 3) | ((high & 1) << 2)).to(S.dtype) - 4
        odd = (((low >> 4) & 3) | ((high >> 4 & 1) << 2)).to(S.dtype) - 4
    return even, odd


@triton.jit
def raise_bits(bytes, table, PLACES: tl.constexpr, S: tl.constexpr):
    """Bytes [n, 16] shifted to the left by PLACES: by 4 in the first half of columns, by 2 in the first and the third
    quarter; in bfloat16 with other bits at their end."""
    if S.dtype == tl.bfloat16:
        ASM: tl.constexpr = RAISE_ASM[PLACES // 4]
        inputs = (bytes, table[1] if PLACES == 4 else table[2])
        raised = tl.inline_asm_elementwise(ASM, "=r,r,r", inputs, tl.uint8, is_pure=True, pack=4)
    else:
        raised = tl.where((tl.arange(0, 16) & (2 * PLACES))[None, :] == 0, bytes << PLACES, bytes)
    return raised


@triton.jit
def decode_points(low, high, table, BEHIND: tl.constexpr, S: tl.constexpr):
    """The numbers of one group in S.dtype, in bfloat16 less a half: the first of both pairs of each byte, then the
    second ones. `low` has bytes of lower bits, `high` those of upper ones before BEHIND groups (formats/vq2.py)."""
    if S.dtype == tl.bfloat16:
        ASM: tl.constexpr = VQ2_ASM[BEHIND]
        found = tl.inline_asm_elementwise(
            ASM,
            VQ2_OPERANDS,
            (low,) + table[0] + (high,),
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        high >>= 6 - 2 * BEHIND
        found = (
            coordinate(_FIRSTS, low & 15, high & 1, S),
            coordinate(_FIRSTS, low >> 4, (high >> 1) & 1, S),
            coordinate(_SECONDS, low & 15, high & 1, S),
            coordinate(_SECONDS, low >> 4, (high >> 1) & 1, S),
        )
    return found


@triton.jit
def coordinate(ALL: tl.constexpr, codes, above, S: tl.constexpr):
    """One coordinate of points in S.dtype; where `above` is 1, of their opposites."""
    found = (ALL >> (60 - 4 * codes.to(tl.int64))) & 15
    return (found ^ (above.to(tl.int64) * 15)).to(S.dtype) - 7.5


@triton.jit
def decode_int8(codes, S: tl.constexpr):
    """Integers of 8 bits in S.dtype."""
    if S.dtype == tl.bfloat16:
        numbers = tl.inline_asm_elementwise(INT8_ASM, "=r,=r,r", [codes], tl.bfloat16, is_pure=True, pack=4)
    else:
        numbers = codes.to(S.dtype)
    return numbers


@triton.jit
def half_int8(codes, DTYPE: tl.constexpr, OFFSET: tl.constexpr):
    """Integers of 8 bits in DTYPE, float16 or float32; in float16 with an OFFSET plus OFFSET_INT8.

    Those with an OFFSET Triton decodes where tensor cores take them. Others it leaves where codes were loaded, and
    numbers go through shared memory: for an operand of which tensor cores take two rows in a register, codes would go
    byte by byte.
    """
    if tl.float32 == DTYPE:
        numbers = codes.to(DTYPE)
    elif _INTERPRETED:
        numbers = codes.to(DTYPE) + (OFFSET_INT8 if OFFSET else 0)
    elif OFFSET:
        numbers = tl.inline_asm_elementwise(OFFSET_INT8_ASM, "=r,=r,r", [codes], tl.float16, is_pure=True, pack=4)
    else:
        # What is not pure, Triton does not move.
        numbers = tl.inline_asm_elementwise(HALF_INT8_ASM, "=r,=r,r", [codes], tl.float16, is_pure=False, pack=4)
    return numbers


@triton.jit
def half_int4(pairs, DTYPE: tl.constexpr, OFFSET: tl.constexpr):
    """Both codes of every byte in DTYPE; with an OFFSET plus OFFSET_INT4 in float16, as `half_int8` says."""
    if tl.float32 == DTYPE:
        low, high = (pairs & 15).to(DTYPE), (pairs >> 4).to(DTYPE)
    elif _INTERPRETED:
        more = OFFSET_INT4 if OFFSET else 0
        low, high = (pairs & 15).to(DTYPE) + more, (pairs >> 4).to(DTYPE) + more
    elif OFFSET:
        low, high = tl.inline_asm_elementwise(
            OFFSET_INT4_ASM, INT4_OPERANDS, [pairs], (tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        low, high = tl.inline_asm_elementwise(
            HALF_INT4_ASM, INT4_OPERANDS, [pairs], (tl.float16, tl.float16), is_pure=False, pack=4
        )
    return low, high


@triton.jit
def multiply_add(a, b, c, S: tl.constexpr):
    """a * b + c in S.dtype; in bfloat16 rounded once."""
    if S.dtype == tl.bfloat16:
        result = tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.bfloat16, is_pure=True, pack=2
        )
    else:
        result = a * b + c
    return result
