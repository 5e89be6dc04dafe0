"""What preparing weights takes of host memory, and how many experts fit a budget at once. Torch-free."""

from __future__ import annotations

from ..errors import DoesNotFit
from ..shape.layouts import ITEM_NBYTES, resident_nbytes
from ..shape.model_shape import LayerShape, ModelShape
from ..shape.shards import LayerShards, ModelShards
from .draft import PROCESS_NBYTES, SLACK_NBYTES
from .drafting import MIB

# More at once is not faster.
WINDOW_NBYTES = 128 << 20
# A window of experts as the files have it, its matrices joined, and stacked as transformers wants them.
WINDOW_COPIES = 3


def window_nbytes(shape: ModelShape, shards: ModelShards, dtype: str, budget: int) -> int:
    """Bytes of experts to convert together when weights are packed within `budget` bytes of host memory.

    Raises DoesNotFit where a part that is converted whole does not fit: one expert, a layer's linears, the head.
    """
    item = ITEM_NBYTES[dtype]
    embedding = shape.embedding_numel * item
    stays = PROCESS_NBYTES + SLACK_NBYTES + resident_nbytes(shape, dtype) - embedding
    layers = max(_layer_nbytes(*pair, item) for pair in zip(shape.layers, shards.layers, strict=True))
    head = shape.head.numel * item + shards.head.nbytes if shape.head and shards.head else 0
    smallest = stays + max(layers, embedding + head)
    if budget < smallest:
        raise DoesNotFit(
            f"{budget // MIB:,} MiB of host memory are too little to pack this model: the smallest that works is "
            f"--ram {-(-smallest // MIB)}MiB, of which {stays // MIB:,} MiB are for the process and small parameters"
        )
    one_expert = max((layer.experts.numel * item for layer in shape.layers if layer.experts), default=0)
    return min(WINDOW_NBYTES, one_expert + (budget - stays - layers) // WINDOW_COPIES)


def _layer_nbytes(layer: LayerShape, packed: LayerShards, item: int) -> int:
    """While a layer is packed: its linears as they were, and packed ones or an expert with its copies."""
    dense = sum(matrix.numel for matrix in layer.dense) * item
    if layer.experts is None or packed.expert is None:
        return dense + packed.dense.nbytes
    experts = WINDOW_COPIES * layer.experts.numel * item + packed.expert.nbytes
    return dense + max(packed.dense.nbytes, experts)
