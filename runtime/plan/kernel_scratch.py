"""What a device's kernels take of its memory in a pass, beside what `pass_nbytes` counts. Torch-free."""

from __future__ import annotations

from ...moe.limits import most_rows
from ...quant.kernels import tuning
from ...quant.kernels.gpu import Gpu
from ..shape.layouts import ITEM_NBYTES
from ..shape.model_shape import ModelShape
from .cache_size import CacheSize

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
