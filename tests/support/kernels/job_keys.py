"""A job of growing sequences in which kernels are not run: what Triton would compile each launch for. A program.

Prints one JSON object: for the attention of some models and for grouped products, how many compilations the warm-up
makes, and those that the job asks for beyond them.
"""

import itertools
import json
import os
import random
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
from triton.runtime.driver import driver

from matrix.compiling.facts import OtherGpu, specialization
from moedge.quant.formats.format import get_format
from moedge.quant.kernels.gpu import Gpu
from moedge.quant.kernels.operands import Gate
from moedge.quant.kernels.product import GroupedProduct, Launch
from moedge.quant.tensor import PackedTensor
from moedge.runtime.attention.triton_backend import TritonAttention
from moedge.runtime.engine.sequence import pack
from support.kernels import attention_setup
from support.kernels.product_launches import warm_up_launches

# Heads, KV format, features, compute capability, whether tiled. Strides of heads of 72 are no multiples of 16.
JOBS = (
    ((8, 2, 72), "bf16", "sinks", (8, 6), False),
    ((4, 1, 64), "int8/int4", "plain", (8, 0), False),
    ((4, 2, 80), "int4", "all", (9, 0), True),
    ((8, 2, 64), "int8", "window", (7, 5), False),
)
# Long enough for several numbers of splits.
attention_setup.LENGTHS = (1, 31, 700, 40, 17, 2)
seen: set[str] = set()


def collect(launch: Launch) -> None:
    seen.add(specialization(launch))


def attention_job(shape: tuple[int, int, int], kv: str, features: str, capability: tuple[int, int], tiled: bool) -> Any:
    """Chunks of any size of whichever sequences are ready, single tokens at last."""
    driver.set_active(OtherGpu(10 * capability[0] + capability[1]))
    setup = attention_setup.Setup(shape, kv, tiled, features)
    dtype = torch.bfloat16 if capability >= (8, 0) else torch.float16
    # As of a float32 model, whose whole prompts take no function of torch that only a GPU has.
    setup.attention = TritonAttention(setup.cache, torch.float32, tiled, Gpu(capability, 28))
    chance = random.Random(5)
    one_pass(setup, [(setup.sequences[1], 4)], dtype)
    return counted(setup.attention.warm_up_launches(), lambda: run_passes(setup, chance, dtype))


def run_passes(setup: attention_setup.Setup, chance: random.Random, dtype: torch.dtype) -> None:
    while pending := [sequence for sequence in setup.sequences if sequence.num_pending]:
        ready = [one for one in pending if chance.random() < 0.7] or pending
        sizes = {one: min(chance.choice((1, 2, 16, 33, 150)), one.num_pending) for one in ready}
        # The last tokens of a long sequence come one by one.
        late = {one: 1 for one in ready if len(one.prompt_ids) > 600 and one.num_pending < 9}
        one_pass(setup, list((sizes | late).items()), dtype)


def one_pass(setup: attention_setup.Setup, chosen: list[tuple[Any, int]], dtype: torch.dtype) -> None:
    for sequence, count in chosen:
        assert setup.cache.grow(sequence.table, sequence.table.num_tokens + count)
    batch = pack(chosen)
    # Heads first in memory, as models hand them over.
    heads = (setup.num_heads, setup.pool.spec.group.kv_heads, setup.pool.spec.group.kv_heads)
    dim = setup.pool.spec.group.head_dim
    q, k, v = (torch.randn(count, batch.num_tokens, dim).to(dtype).transpose(0, 1) for count in heads)
    setup.attention.attend(setup.call, q, k, v, batch)
    for sequence, count in chosen:
        setup.store(sequence, count)


def product_job(name: str, shape: tuple[int, int], gate: Gate | None, bias: bool) -> Any:
    """Groups of one to six experts, of one to a hundred rows each."""
    driver.set_active(OtherGpu(86))
    layout = get_format(name).layout(shape, "bfloat16")
    product, chance = GroupedProduct("cpu"), random.Random(3)
    arena = torch.zeros(8 * layout.nbytes + 64, dtype=torch.uint8)
    begins = range(-arena.data_ptr() % 64, 8 * layout.nbytes, layout.nbytes)
    matrices = [PackedTensor.bind(layout, arena[begin : begin + layout.nbytes]) for begin in begins]
    biases = list(torch.zeros(len(matrices), shape[0], dtype=torch.bfloat16))

    def job() -> None:
        for _ in range(60):
            chosen = chance.sample(range(len(matrices)), chance.randint(1, 6))
            ends = list(itertools.accumulate(chance.choice((1, 7, 20, 100)) for _ in chosen))
            spans = [slice(begin, end) for begin, end in itertools.pairwise([0, *ends])]
            x = torch.zeros(chance.randint(1, 99), shape[1], dtype=torch.bfloat16)
            out = x.new_zeros(ends[-1], shape[0] // (2 if gate else 1))
            ids = torch.zeros(ends[-1], dtype=torch.int64)
            parts = ([matrices[n] for n in chosen], [biases[n] if bias else None for n in chosen])
            product.launch(x, out, *parts, product.rows(spans, x), ids, gate).run()

    return counted(warm_up_launches(product, layout, torch.bfloat16, bias=bias, gate=gate, gathers=True), job)


def counted(warm_up: list[Launch], job: Callable[[], None]) -> dict[str, Any]:
    seen.clear()
    for launch in warm_up:
        launch.run()
    warmed = set(seen)
    seen.clear()
    job()
    return {"warmed": len(warmed), "used": len(seen), "beyond": sorted(seen - warmed)}


if __name__ == "__main__":
    Launch.run = collect  # type: ignore[method-assign]
    found = {f"{job[1]} {job[2]} sm{job[3]}": attention_job(*job) for job in JOBS}
    found["nf4"] = product_job("nf4", (256, 128), Gate("silu"), bias=False)
    found["int8"] = product_job("int8", (104, 64), None, bias=True)
    print(json.dumps(found))
