"""Passes in which sequences decode on a device that computes nothing: what they cost its host, per sequence.

Real are the engine, its scheduler and block tables, packing, attention's tables of pages in every layer, what a draw
asks of the host, and text out of tokens. Kernels are not launched, the layers have nothing beside attention, and every
sequence gets the same token. A device has as many copies of tables whatever the number of sequences.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, decoders, models

from moedge.offload.memory import gc_paused
from moedge.quant.kernels.gpu import Gpu
from moedge.quant.kernels.product import Launch
from moedge.runtime.attention.protocol import AttentionCall
from moedge.runtime.attention.triton_backend import TritonAttention
from moedge.runtime.engine.engine import Engine
from moedge.runtime.engine.scheduler import PassLimits, Scheduler
from moedge.runtime.engine.sequence import Batch, Sequence
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import KVPool
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.sampling.sampler import Sampler
from moedge.runtime.shape.model_shape import KVGroup
from moedge.runtime.text.stream import TextStream, decoding

# Sequences stop at 63, which none gets.
VOCAB, HEAD, EOS, PROMPT, NEW = 64, 16, frozenset([63]), 512, 128
GROUP = KVGroup((0,), 1, HEAD, None)


class NoLayers:
    """Asks attention in every layer, and has zeros for logits."""

    def __init__(self, attention: TritonAttention, layers: int) -> None:
        self._attention, self._layers = attention, layers

    def forward(self, batch: Batch) -> torch.Tensor:
        x = torch.zeros(batch.num_tokens, 1, HEAD, dtype=torch.bfloat16)
        for _ in range(self._layers):
            self._attention.attend(AttentionCall(0, 1.0), x, x, x, batch)
        return torch.zeros(len(batch.logit_rows), VOCAB)


def draw(logits: torch.Tensor, columns: torch.Tensor, rows: Any) -> torch.Tensor:
    """In place of the kernel, with what it asks of the host: always the same token."""
    where = torch.tensor(rows, dtype=torch.float64).view(1, -1, 1)
    return torch.cat([columns, where])[0, :, 0].long().clamp_(max=0)


@contextmanager
def decoding_engine(count: int, sampled: bool, layers: int) -> Iterator[Engine]:
    """`count` sequences of PROMPT tokens that have begun to decode, NEW tokens at most; greedily, or with top-k and
    top-p."""
    cache = KVCache([KVPool(spec := KVSpec(GROUP, "bf16"), count * spec.blocks_for(PROMPT + NEW + 1))])
    backend = Tokenizer(models.BPE({chr(33 + index): index for index in range(VOCAB)}, []))
    backend.decoder = decoders.ByteLevel()
    pieces = decoding(backend)
    attention = TritonAttention(cache, torch.bfloat16, tiled=False, gpu=Gpu((8, 6), 28))
    scheduler = Scheduler(PassLimits(count * PROMPT, count), cache)
    engine = Engine(NoLayers(attention, layers), scheduler, Sampler(draw=draw))
    filters: dict[str, Any] = {"temperature": 0.7, "top_k": 40, "top_p": 0.9} if sampled else {"temperature": 0.0}
    with patch.object(Launch, "run", lambda launch: None), torch.inference_mode():
        for seed in range(count):
            prompt = [seed % VOCAB, seed // VOCAB, *range(2, PROMPT)]
            text = TextStream(pieces.detokenizer())
            engine.add(Sequence(prompt, SequenceSampling(NEW, seed=seed, **filters), EOS, text=text))
        # The first is of prompts, the next takes a block of each sequence.
        for _ in range(3):
            engine.step()
        yield engine
    engine.close()


def calls(engine: Engine) -> int:
    """Functions of Python that a pass calls."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    # A collection in it would call what others, such as hypothesis, have it call.
    with gc_paused():
        sys.setprofile(profile)
        try:
            engine.step()
        finally:
            sys.setprofile(None)
    return count


def calls_per_sequence(sampled: bool, layers: int) -> float:
    """Functions of Python that a sequence more in a pass calls, where it takes no block."""
    few, many = 4, 12
    found = []
    for count in (few, many):
        with decoding_engine(count, sampled, layers) as engine:
            found.append(calls(engine))
    return (found[1] - found[0]) / (many - few)
