"""How many bytes a pass needs beside weights and cache: a formula of its tokens, tested against measured peaks."""

from __future__ import annotations

from dataclasses import dataclass

from ...moe.expected_rows import most_rows
from ...quant.kernels import tuning
from ...quant.kernels.gpu import Gpu
from ..attention.choice import JOB_NUMEL, PARTS_NBYTES, PIECE_TOKENS
from ..shape.model_shape import ModelShape
from ..shape.shards import ITEM_NBYTES
from .cache_size import CacheSize

# Copies of [T, D] that live at once in a decoder layer: residual, normed (also in fp32), attention in and out.
_HIDDEN_COPIES = 6
_FP32_COPIES = 2
# More threads than these take part of the slack.
DECODING_THREADS = 4
# The sampler works in tiles of at most this size.
SAMPLER_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Widest:
    """The largest of every kind that any layer has, by which activations are sized: found once."""

    hidden: int
    vocab: int
    kv: int
    dense: int
    inner: int
    per_token: int
    num_experts: int

    @classmethod
    def of(cls, shape: ModelShape) -> Widest:
        experts = {layer.experts for layer in shape.layers if layer.experts}
        return cls(
            shape.hidden,
            shape.vocab,
            max(group.kv_heads * group.head_dim for group in shape.kv_groups),
            max((matrix.rows for layer in shape.layers for matrix in layer.dense), default=0),
            max((each.up.rows for each in experts), default=0),
            max((each.per_token for each in experts), default=0),
            max((each.count for each in experts), default=0),
        )


def pass_nbytes(widest: Widest, dtype: str, num_tokens: int, num_sampled: int, longest: int) -> int:
    """Bytes of activations, logits and scratch of prompts' attention, of a pass of `num_tokens` tokens.

    `num_sampled` rows get logits; `longest` is the longest sequence, whose keys and values are gathered.
    """
    item = ITEM_NBYTES[dtype]
    hidden = num_tokens * widest.hidden
    rows = most_rows(num_tokens, widest.per_token, widest.num_experts)
    layer = (
        _HIDDEN_COPIES * hidden * item
        + _FP32_COPIES * hidden * 4
        + 3 * num_tokens * widest.dense * item
        + rows * widest.hidden * item
        + 3 * num_tokens * widest.inner * item
    )
    logits = num_sampled * widest.vocab * (item + 4) + SAMPLER_NBYTES
    gathered = 2 * longest * widest.kv * item
    # One sequence of a prompt, keys and values twice.
    return max(layer, logits) + 2 * gathered


def decoding_nbytes(widest: Widest, dtype: str, num_sequences: int, longest: int) -> int:
    """What torch's attention takes for tokens that are decoded, beside `pass_nbytes`.

    Keys of a job gathered and in float32, and their products; what pieces found, and the sums of it.
    """
    item = ITEM_NBYTES[dtype]
    pieces = num_sequences * (longest // PIECE_TOKENS + 1)
    job = min(JOB_NUMEL, pieces * PIECE_TOKENS * widest.kv) * (item + 8)
    parts = min(PARTS_NBYTES, pieces * widest.dense * item)
    return DECODING_THREADS * job + parts + 3 * num_sequences * widest.dense * 4


# Of one tile of rows (operands.Pages), and of a token's slot.
_TILE_NBYTES, _SLOT_NBYTES = 20, 8


def groups_experts(shape: ModelShape, quant: str, gpu: Gpu) -> bool:
    """Whether experts that arrive together are computed together."""
    return (
        shape.num_experts > 0 and quant in tuning.FORMATS and tuning.supports(gpu.capability) and not gpu.lacks.experts
    )


def experts_nbytes(shape: ModelShape, dtype: str, num_tokens: int) -> int:
    """What lies between an expert's two matrices, for all rows of a pass: [P, I]."""
    experts = [layer.experts for layer in shape.layers if layer.experts]
    numel = max(most_rows(num_tokens, each.per_token, each.count) * each.down.cols for each in experts)
    return numel * ITEM_NBYTES[dtype]


def attention_nbytes(shape: ModelShape, cache: CacheSize, dtype: str, num_sequences: int, gpu: Gpu) -> int:
    """Queries and keys in the frame that they are stored in, prompts read back, splits, tables."""
    item, tokens = ITEM_NBYTES[dtype], cache.tokens_per_pass
    queries = max((matrix.rows for layer in shape.layers for matrix in layer.dense), default=0)
    framed = prompts = splits = tables = 0
    for spec in cache.specs:
        width = spec.group.kv_heads * spec.group.head_dim
        framed = max(framed, 2 * tokens * (queries + width) * 4 * spec.layout.format.keys.quantized)
        # Queries and results once more, keys and values by way of float32.
        prompts = max(prompts, tokens * (queries * (4 + 2 * item) + 2 * width * (6 + item)))
        # Sums of twice as many programs as there are processors, float32 with maximum and total.
        heads = -(-queries // width)
        splits = max(splits, 2 * gpu.processors * heads * (spec.group.head_dim + 2) * 4)
        tables += num_sequences * spec.blocks_for(cache.longest) * 4 + tokens * (2 * _TILE_NBYTES + 2 * _SLOT_NBYTES)
    return framed + prompts + splits + tables
