"""Random planes of any weight format, and the matrix that they stand for, written from the words of the format."""

import torch
from torch import Tensor

from moedge.quant.formats import mxfp4, nf4, vq2
from moedge.quant.formats.format import CODE_BITS, WeightFormat
from moedge.quant.tensor import Planes, unpack_nibbles

VALUES = {"nf4": nf4.LEVELS, "e2m1": mxfp4.LEVELS}


def random_planes(chosen: WeightFormat, shape: tuple[int, int], seed: int = 0) -> Planes:
    """Any codes, scales about 1/16 in the format's dtype (of int3 of either sign), zeros in the middle of the codes;
    pairs of any bytes."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_columns = shape
    whole = chosen.codes == "int8"
    codes = torch.randint(0, 256, (num_rows, int(num_columns * CODE_BITS[chosen.codes] / 8)), generator=generator)
    groups = (num_rows, num_columns // chosen.group) if chosen.group else (num_rows,)
    scales = (torch.rand(groups, generator=generator) + 0.5) / 16
    zeros = factors = None
    if chosen.block:
        scales = torch.randint(0, 64, groups, generator=generator)
        factors = (torch.rand(num_rows, num_columns // chosen.block, 2, generator=generator) / 512).half()
    elif chosen.scales == "e8m0":
        scales = torch.randint(110, 130, groups, generator=generator)
    elif chosen.paired:
        scales = torch.stack([torch.randint(low, 256, groups, generator=generator) for low in (1, 0)], 2)
        factors = (torch.rand(num_rows, generator=generator) + 0.5) / 2048
    if chosen.zeros == "uint8" and not chosen.paired:
        # GPTQ's first version stores zero points minus one: 16 occurs.
        zeros = torch.randint(0, 64 if chosen.block else 17, groups, generator=generator).to(torch.uint8)
    if chosen.codes == "int3":
        scales *= 2 * torch.randint(0, 2, groups, generator=generator) - 1
    dtype = torch.uint8 if chosen.scales == "e8m0" else getattr(torch, chosen.scales)
    return Planes((codes - 128).to(torch.int8) if whole else codes.to(torch.uint8), scales.to(dtype), zeros, factors)


def int3_codes(codes: Tensor) -> Tensor:
    """The numbers [N, K] in bytes [N, 3 K/8], bit by bit: for each chunk of columns bytes with two bits of each column,
    then bytes with one. A byte has pairs of columns, of which the even ones of all groups come first."""
    num_rows, nbytes = codes.shape
    chunk = next(each for each in (128, 64, 32) if nbytes * 8 // 3 % each == 0)
    numbers = torch.zeros(num_rows, nbytes * 8 // 3, dtype=torch.int32)
    groups = chunk // 32
    for column in range(numbers.shape[1]):
        begin, (group, rest) = column // chunk * (chunk * 3 // 8), divmod(column % chunk, 32)
        pair, parity = divmod(rest, 2)
        for width, before, shared in ((2, 0, min(2, groups)), (1, chunk // 4, groups)):
            # A pair has two halves in a byte, and 16 of them so many bytes.
            half = width * shared
            place, byte = divmod(pair, 4 * half)
            at = begin + before + group // shared * 16 + byte
            shift = place * 2 * half + parity * half + group % shared * width
            numbers[:, column] |= (codes[:, at].int() >> shift & (1 << width) - 1) << (0 if width == 2 else 2)
    return numbers


def vq2_values(codes: Tensor) -> Tensor:
    """The values [N, K] of bytes [N, 5 K/16], pair by pair: for each chunk of columns bytes with the points of two
    pairs, then bytes that say whether second values are positive."""
    num_rows, nbytes = codes.shape
    groups = 2 if nbytes % 40 == 0 else 1
    values = torch.empty(num_rows, nbytes * 16 // 5, dtype=torch.float64)
    for pair in range(nbytes * 8 // 5):
        chunk, within = divmod(pair, 32 * groups)
        group, (byte, half) = within // 32, divmod(within % 32, 2)
        place, last = divmod(byte, 4 * groups)
        low, high = codes.view(num_rows, -1, 20 * groups)[:, chunk].int().split([16 * groups, 4 * groups], 1)
        point = torch.tensor(vq2.POINTS)[low[:, 16 * group + byte] >> 4 * half & 15]
        positive = high[:, last] >> 2 * (groups * place + group) + half & 1
        sign = torch.where((point // 16 > 7.5) == positive.bool(), 1, -1)
        first = pair // 4 * 8 + pair % 4
        values[:, first], values[:, first + 4] = sign * (point % 16 - 7.5), sign * (point // 16 - 7.5)
    return values


def defined(chosen: WeightFormat, planes: Planes) -> Tensor:
    """The matrix, float64 [N, K]."""
    if chosen.codes == "int8":
        values = planes.codes.double()
    elif chosen.codes == "int3":
        values = (int3_codes(planes.codes) - 4).double()
    elif chosen.codes == "vq2":
        values = vq2_values(planes.codes)
    else:
        values = unpack_nibbles(planes.codes, high_first=chosen.codes == "nf4").double()
    if chosen.codes in VALUES:
        values = torch.tensor(VALUES[chosen.codes], dtype=torch.float64)[values.long()]

    def spread(plane: Tensor) -> Tensor:
        """One number for each weight."""
        wide = plane.double().view(plane.shape[0], -1)
        return wide.repeat_interleave(values.shape[1] // wide.shape[1], 1)

    if chosen.paired:
        assert planes.factors is not None
        scale, zero = (spread(each) for each in planes.scales.unbind(2))
        return (values - zero / 16) * scale * spread(planes.factors)
    scales = spread(planes.scales)
    if chosen.scales == "e8m0":
        scales = torch.exp2(scales - 127)
    if planes.factors is not None:
        assert planes.zeros is not None
        first, second = planes.factors.unbind(2)
        return values * scales * spread(first) - spread(planes.zeros) * spread(second)
    if planes.zeros is None:
        return (values - 8 if chosen.codes == "int4" else values) * scales
    return (values - spread(planes.zeros)) * scales
