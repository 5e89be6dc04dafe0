"""Instructions that kernels spend on a weight or on an element of keys and values, counted in what they compile to.

    PYTHONPATH=tests python -m matrix.compiling.instructions 89 90

prints, as JSON, instructions of all threads in the hot loop (the longest one) over the elements that it decodes, for
GPUs of these architectures; of attention for heads of each of `HEADS`. `runtime/plan/presets.py` has the figures;
needs no GPU.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
from triton.runtime.driver import driver

from matrix.compiling import facts
from moedge.quant.formats.format import get_format
from moedge.quant.kernels import operands, product
from moedge.quant.kernels.operands import Gate
from moedge.quant.kernels.product import Launch
from moedge.quant.kernels.tuning import TILE_ROWS
from moedge.quant.tensor import PackedTensor, torch_dtype
from moedge.runtime.attention.kernels.operands import has_dot
from support.kernels import paged_cases

# Gate and up of an expert of Qwen3-30B-A3B, and its heads; kernels have sizes of their own for each size of heads.
WEIGHT, GROUP, KV_HEADS = (1536, 2048), 8, 4
HEADS = (64, 96, 128, 256)
KV = ("native", "int8", "int8/int4", "int4")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
_BACK = re.compile(r"\bBRA\b[^;]*?0x([0-9a-f]+)")


def loop_length(sass: str) -> int:
    """Instructions of the longest loop."""
    lines = [(int(at, 16), text) for at, text in _INSTRUCTION.findall(sass)]
    loops = [
        sum(int(found[1], 16) <= at <= end for at, _ in lines)
        for end, text in lines
        if (found := _BACK.search(text)) and int(found[1], 16) < end
    ]
    return max(loops)


def per_element(launch: Launch, elements: int) -> float:
    """Thread instructions for each of `elements`, which one turn of the loop decodes."""
    length = loop_length(facts.inspect(launch.compile().asm["cubin"], "-sass"))
    return round(length * launch.warps * 32 / elements, 1)


def weights(name: str, rows: int) -> float:
    """Of the grouped product with a format, in tiles of `rows`; each turn decodes gate and up."""
    layout = get_format(name).in_order("rows").layout(WEIGHT, "bfloat16")
    planes = tuple(torch.empty(64, dtype=torch_dtype(plane.dtype)) for plane in layout.planes)
    tiles = product.RowTiles(torch.zeros(1, 3, dtype=torch.int32), rows)
    x, out = (torch.empty(32, width, dtype=torch.bfloat16) for width in (WEIGHT[1], WEIGHT[0] // 2))
    grouped = product.GroupedProduct(torch.device("cpu"))
    launch = grouped.launch(x, out, [PackedTensor(layout, planes)], [None], tiles, torch.zeros(32).long(), Gate("silu"))
    sizes = launch.arguments[-1]
    return per_element(launch, 2 * sizes.outputs * sizes.depth)


def attention(kernel: str, kv: str, head: int, length: tuple[int, int]) -> float:
    """Of attention over a cache in a format; `length` is (past, count) of each sequence."""
    keys, values = kv.split("/", maxsplit=1)[0], kv.rsplit("/", maxsplit=1)[-1]
    case = paged_cases.Case(
        keys, values, head, GROUP, 32, KV_HEADS, (length,) * 2, dtype=torch.bfloat16, native=torch.bfloat16
    )
    cut = paged_cases.cut_of(kernel, case)
    # Where a program computes fewer heads than share a key, several decode the same element.
    times = -(-GROUP // cut.heads)
    return round(times * per_element(paged_cases.Cache.make(case).launches(kernel)[0], 2 * cut.keys * head), 1)


def counts(arch: int) -> dict[str, Any]:
    driver.set_active(facts.OtherGpu(arch))
    found: dict[str, Any] = {"weights": {}, "decode": {}, "prompts": {}}
    dots = has_dot((arch // 10, arch % 10))
    for name in ("none", "int8", "int4", "nf4", "mxfp4", "int3", "vq2") if dots else ():
        found["weights"][name] = {rows: weights(name, rows) for rows in TILE_ROWS}
    for kv in KV:
        decode = "decode" if dots else "decode without dot"
        found["decode"][kv] = {head: attention(decode, kv, head, (63, 1)) for head in HEADS}
        if dots:
            found["prompts"][kv] = {head: attention("extend", kv, head, (64, 64)) for head in HEADS}
    return found


if __name__ == "__main__":
    # The kernel is compiled, not run: its addresses stay in host memory.
    product.upload = operands.upload = lambda x, device: x  # type: ignore[assignment]
    print(json.dumps({f"sm{arch}": counts(int(arch)) for arch in sys.argv[1:]}))
