"""Decode attention on a CPU: one layer, a batch of live sequences, every format, against the obvious code.

python -m bench.micro attention       # 128 sequences of 1,024 tokens, shapes of well-known models
python -m bench.micro attention --ragged        # lengths spread evenly from 512 to 1,536
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

# As in jobs: threads of torch that wait do not take the kernels' cores, and the cache lies in large pages.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
import torch.nn.functional as F

from bench.peers.rates import bandwidth, product_rate
from moedge.quant.matmul.thread_pool import WorkerPool
from moedge.quant.native import library
from moedge.runtime.attention.native_rows import RowAttention, RowQuery, stored
from moedge.runtime.attention.protocol import AttentionCall
from moedge.runtime.attention.torch_backend import TorchAttention
from moedge.runtime.engine.sequence import Batch, Sequence, pack
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import KVPool
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.shape.model_shape import KVGroup

# Query heads, KV heads, head size.
SHAPES = {"Qwen3-30B-A3B": (32, 4, 128), "Mixtral-8x7B": (32, 8, 128), "gpt-oss-20b": (64, 8, 64)}
FORMATS = ("bf16", "int8", "int8/int4", "int4")


def median(run: Callable[[], object], repeats: int) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


class Decode:
    """A cache full of sequences that each have one new token. Their blocks lie scattered in the pool."""

    def __init__(self, shape: tuple[int, int, int], kv_format: str, lengths: list[int], native: bool = False) -> None:
        self.num_heads, kv_heads, self.dim = shape
        spec = KVSpec(KVGroup((0,), kv_heads, self.dim, None), kv_format)
        num_blocks = sum(spec.blocks_for(length) for length in lengths)
        self.pool = KVPool(spec, num_blocks)
        cache = KVCache([self.pool])
        self.attention = TorchAttention(cache, torch.bfloat16, tiled=False, native=native)
        scattered = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        self.sequences = []
        for length in lengths:
            sequence = Sequence([0] * length, SequenceSampling(1))
            count = spec.blocks_for(length)
            sequence.table.blocks, scattered = [scattered[:count]], scattered[count:]
            sequence.table.num_tokens = length - 1
            self._fill(sequence.table.blocks[0])
            self.sequences.append(sequence)
        self.batch: Batch = pack([(sequence, 1) for sequence in self.sequences])
        self.q = torch.randn(len(lengths), self.num_heads, self.dim).bfloat16()
        self.k, self.v = (torch.randn(len(lengths), kv_heads, self.dim).bfloat16() for _ in range(2))
        self.call, self.out = AttentionCall(0, self.dim**-0.5), torch.empty_like(self.q)
        self.rows = RowAttention(cache, torch.bfloat16, WorkerPool(torch.get_num_threads()))
        self.plan = self.rows.plan(self.call, self.batch, 0)

    def _fill(self, blocks: list[int]) -> None:
        block, group = self.pool.spec.block, self.pool.spec.group
        ids = torch.tensor(blocks).repeat_interleave(block)
        offsets = torch.arange(block).repeat(len(blocks))
        k, v = (torch.randn(len(ids), group.kv_heads, self.dim) for _ in range(2))
        self.pool.write(0, ids, offsets, k, v)

    @property
    def nbytes(self) -> float:
        """Bytes of the cache that must be read."""
        return sum(sequence.num_tokens for sequence in self.sequences) * self.pool.spec.token_nbytes

    @property
    def operations(self) -> float:
        """Of the products of queries with keys and of weights with values."""
        return 4 * sum(sequence.num_tokens for sequence in self.sequences) * self.num_heads * self.dim

    def run(self) -> torch.Tensor:
        return self.attention.attend(self.call, self.q, self.k, self.v, self.batch)

    def read(self) -> torch.Tensor:
        """The CPU kernels alone, after this pass's keys and values are stored."""
        assert self.plan is not None
        keys, values = stored(self.pool, 0)
        self.rows.attend(RowQuery.of(self.call, self.pool, 0, self.q), [keys], values, self.plan, self.out)
        return self.out

    def obvious(self) -> torch.Tensor:
        """Gather all sequences into one padded tensor, mask, SDPA with enable_gqa."""
        lengths = torch.tensor([sequence.num_tokens for sequence in self.sequences])
        tables = [torch.tensor(sequence.table.blocks[0]) for sequence in self.sequences]
        table = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        k, v = (side.codes[table].transpose(1, 2).flatten(2, 3) for side in self.pool.planes(0))
        mask = torch.arange(k.shape[2]) < lengths.view(-1, 1, 1, 1)
        return F.scaled_dot_product_attention(self.q.unsqueeze(2), k, v, attn_mask=mask, enable_gqa=True).squeeze(2)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--ragged", action="store_true", help="lengths from half the context to one and a half")
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--torch", action="store_true", help="torch's operations instead of the CPU kernels")


@torch.inference_mode()
def run(options: argparse.Namespace) -> None:
    lengths = [options.context] * options.sequences
    if options.ragged:
        lengths = torch.linspace(options.context / 2, options.context * 1.5, options.sequences).long().tolist()
    native = library.available() and not options.torch
    rate, products = bandwidth(), product_rate()
    backend = f"CPU kernels with {library.loaded().isa}" if native else "torch"
    print(f"{backend}; {torch.get_num_threads()} threads, memory read at {rate / 1e9:.1f} GB/s, products of bf16 at "
          f"{products / 1e9:.0f} GFLOP/s; {len(lengths)} sequences of {min(lengths):,} to {max(lengths):,} tokens; "
          "ms per layer\n")  # fmt: skip
    print("| heads | format | ms with storing | ms | MB | GB/s | GFLOP/s | share of the smaller roof | "
          "obvious code, ms | against bf16 |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in options.shape or SHAPES:
        in_bf16 = obvious = 0.0
        for kv_format in FORMATS:
            decode = Decode(SHAPES[name], kv_format, lengths, native)
            if kv_format == "bf16":
                obvious = median(decode.obvious, options.repeats)
                assert torch.allclose(decode.run().float(), decode.obvious().float(), atol=0.02)
            whole = seconds = median(decode.run, options.repeats)
            if native:
                seconds = median(decode.read, options.repeats)
            in_bf16 = in_bf16 or seconds
            roof = max(decode.nbytes / rate, decode.operations / products)
            print(f"| {name} | {kv_format} | {whole * 1e3:.1f} | {seconds * 1e3:.1f} | {decode.nbytes / 1e6:.0f} | "
                  f"{decode.nbytes / seconds / 1e9:.1f} | {decode.operations / seconds / 1e9:.0f} | "
                  f"{roof / seconds:.0%} | {obvious * 1e3:.0f} | {seconds / in_bf16:.2f} |",
                  flush=True)  # fmt: skip
