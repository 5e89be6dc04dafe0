"""The demo model's tokenizer, and an engine whose logits are noise over its vocabulary."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moedge.runtime.engine.engine import Engine
from moedge.runtime.engine.scheduler import PassLimits, Scheduler
from moedge.runtime.engine.sequence import Batch, TokenChunk
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import KVPool
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.sampling.grammar import Grammars
from moedge.runtime.sampling.sampler import Sampler
from moedge.runtime.shape.model_shape import KVGroup
from moedge.runtime.text.tokenizer import Tokenizer

MODEL = Path(__file__).parents[3] / "examples" / "tiny_moe" / "model"
# Wider than the tokenizer's vocabulary, as padded output heads are.
VOCAB = 3072 + 50


class NoiseModel:
    """Logits are a hash of the tokens so far: as unlike language as can be, and the same on any schedule."""

    def forward(self, batch: Batch) -> torch.Tensor:
        rows = [torch.zeros(0, VOCAB)]
        for chunk in batch.chunks:
            rows.append(noise_of(chunk, chunk.drafted).expand(len(chunk.sampling), VOCAB))
        rows += [noise_of(chunk, behind) for chunk in batch.chunks for behind in reversed(range(chunk.drafted))]
        return torch.cat(rows)


def noise_of(chunk: TokenChunk, behind: int) -> torch.Tensor:
    """Logits [1, V] of the row that has `behind` others of its chunk behind it."""
    seed = hash(tuple(chunk.sequence.tokens(0, chunk.past + chunk.count - behind))) % (1 << 63)
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))


def noise_engine(blocks: int = 200, max_sequences: int = 16, free_tokens: tuple[int, ...] = ()) -> Engine:
    cache = KVCache([KVPool(KVSpec(KVGroup((0,), 1, 2, None), "fp32", 16), blocks)])
    return Engine(NoiseModel(), Scheduler(PassLimits(64, max_sequences, free_tokens=free_tokens), cache), Sampler())


@pytest.fixture(scope="session")
def tokenizer() -> Iterator[Tokenizer]:
    with Tokenizer.load(MODEL) as tokenizer:
        yield tokenizer


@pytest.fixture(scope="session")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB)
