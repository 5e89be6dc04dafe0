"""How many bytes a pass needs beside weights and cache: a formula of its tokens, tested against measured peaks."""

from __future__ import annotations

from ...moe.limits import most_rows
from ..attention.limits import NATIVE_NBYTES, WIDE_NUMEL
from ..shape.layouts import ITEM_NBYTES
from ..shape.model_shape import ModelShape

# Copies of [T, D] that live at once in a decoder layer: residual, normed (also in fp32), attention in and out.
_HIDDEN_COPIES = 6
_FP32_COPIES = 2
# Their scratch shares NATIVE_NBYTES; more threads than these take part of the slack.
DECODING_THREADS = 4
# The sampler works in tiles of at most this size.
SAMPLER_NBYTES = 64 << 20


def pass_nbytes(shape: ModelShape, dtype: str, num_tokens: int, num_sampled: int, longest: int) -> int:
    """Bytes of activations, logits and attention scratch of a pass of `num_tokens` tokens.

    `num_sampled` rows get logits; `longest` is the longest sequence, whose keys and values are gathered.
    """
    item = ITEM_NBYTES[dtype]
    hidden = num_tokens * shape.hidden
    kv = max(group.kv_heads * group.head_dim for group in shape.kv_groups)
    wide = max((matrix.rows for layer in shape.layers for matrix in layer.dense), default=0)
    per_token = max((layer.experts.per_token for layer in shape.layers if layer.experts), default=0)
    inner = max((layer.experts.up.rows for layer in shape.layers if layer.experts), default=0)
    count = max((layer.experts.count for layer in shape.layers if layer.experts), default=0)
    rows = most_rows(num_tokens, per_token, count)
    layer = (
        _HIDDEN_COPIES * hidden * item
        + _FP32_COPIES * hidden * 4
        + 3 * num_tokens * wide * item
        + rows * shape.hidden * item
        + 3 * num_tokens * inner * item
    )
    logits = num_sampled * shape.vocab * (item + 4) + SAMPLER_NBYTES
    gathered = 2 * longest * kv * item
    # One sequence of a prompt, keys and values twice; and what some threads gather of decoding sequences.
    decoding = DECODING_THREADS * max(gathered, 2 * WIDE_NUMEL * item)
    attention = 2 * gathered + min(NATIVE_NBYTES, decoding) + 2 * DECODING_THREADS * 4 * WIDE_NUMEL
    return max(layer, logits) + attention
