"""The demo model's tokenizer, and an engine whose logits are noise over its vocabulary."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moedge.runtime.batch import Batch
from moedge.runtime.engine import Engine
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import NativePool
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.sampling.sampler import Sampler
from moedge.runtime.scheduler import PassLimits, Scheduler
from moedge.runtime.shape.model_shape import KVGroup
from moedge.runtime.structured.grammar import Grammars
from moedge.runtime.text.tokenizer import Tokenizer

MODEL = Path(__file__).parents[3] / "examples" / "tiny_moe" / "model"
# Wider than the tokenizer's vocabulary, as padded output heads are.
VOCAB = 3072 + 50


class NoiseModel:
    """Logits are a hash of the tokens so far: as unlike language as can be, and the same on any schedule."""

    def __init__(self) -> None:
        self.tokens: dict[object, list[int]] = {}

    def forward(self, batch: Batch) -> torch.Tensor:
        rows = []
        for chunk in batch.chunks:
            tokens = self.tokens.setdefault(chunk.sequence, [])
            del tokens[chunk.past :]
            tokens += batch.token_ids[0, chunk.begin : chunk.end].tolist()
            if chunk.samples:
                seed = hash(tuple(tokens)) % (1 << 63)
                rows.append(torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)))
        return torch.stack(rows) if rows else torch.zeros(0, VOCAB)


def noise_engine(blocks: int = 200, max_sequences: int = 16) -> Engine:
    cache = KVCache([NativePool(KVSpec(KVGroup((0,), 1, 2, None), "fp32", 16), blocks)], blocks)
    return Engine(NoiseModel(), Scheduler(PassLimits(64, max_sequences), cache), Sampler())


@pytest.fixture(scope="session")
def tokenizer() -> Iterator[Tokenizer]:
    with Tokenizer.load(MODEL) as tokenizer:
        yield tokenizer


@pytest.fixture(scope="session")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB)
