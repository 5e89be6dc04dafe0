"""The memory layout of one layer group's keys and values. Torch-free, so that a planner can size caches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from ...quant.formats.format import FormatError
from ...quant.kv.format import KVFormat, RecordLayout
from ..settings.errors import SettingError
from ..shape.model_shape import KVGroup, StateGroup
from ..shape.shards import ITEM_NBYTES

BLOCK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class KVSpec:
    """One layer group in one format (a name of `KV_FORMATS`): a record is `block` tokens of one layer."""

    group: KVGroup
    format: str
    block: int = BLOCK_TOKENS

    @property
    def layout(self) -> RecordLayout:
        """Raises SettingError for a format that cannot hold the group's heads."""
        return _layout(self.format, self.group.kv_heads, self.group.head_dim, self.block, self.group.rope_dim)

    @property
    def record_nbytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.layout.nbytes

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block in all layers of the group."""
        return len(self.group.layers) * self.record_nbytes

    @property
    def token_nbytes(self) -> float:
        return self.block_nbytes / self.block

    @property
    def scale_fraction(self) -> float:
        """The fraction of a record that is scales and zeros."""
        sides = (self.layout.keys, self.layout.values)
        planes = (plane for side in sides for plane in (side.scales, side.zeros))
        return sum(plane.nbytes for plane in planes if plane is not None) / self.layout.nbytes

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block)

    def first_block(self, position: int) -> int:
        """The first block that the token at `position` attends to."""
        return self.group.first_visible(position) // self.block

    def least_blocks(self, num_tokens: int) -> int:
        """The least number of blocks that a sequence of `num_tokens` needs, however small its chunks are."""
        window = self.group.window
        whole = self.blocks_for(num_tokens)
        return whole if window is None else min(whole, self.blocks_for(window - 1) + 1)


# Deterministic scans of prompts get this many tokens at a time, from multiples of it on; prompts are cut there only.
SCAN_CHUNK = 16
# Others get up to this many, in chunks of SCAN_TOKENS for which products replace the recurrence.
SCANNED_TOKENS = 512
SCAN_TOKENS = 64
# States of a layer that are gathered at a time for one token of each sequence.
STEP_NBYTES = 64 << 20
# Bytes of an element of a scan's state: float32, because every token's rounding would stay in it.
_RECURRENT_NBYTES = 4


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What a sequence keeps in recurrent layers; `dtype` (bf16, fp16, fp32) is that of the model's activations."""

    groups: tuple[StateGroup, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's states, however long it is; 0 for a model without recurrent layers."""
        return sum(len(group.layers) * self.layer_nbytes(group) for group in self.groups)

    @property
    def largest_nbytes(self) -> int:
        """The same in the layer where they are the most."""
        return max((self.layer_nbytes(group) for group in self.groups), default=0)

    def layer_nbytes(self, group: StateGroup) -> int:
        """Bytes of one sequence's state in one layer of a group."""
        recurrent = math.prod(group.recurrent) * _RECURRENT_NBYTES if group.recurrent else 0
        conv = math.prod(group.conv) * ITEM_NBYTES[self.dtype] if group.conv else 0
        return conv + recurrent


@cache
def _layout(kv_format: str, kv_heads: int, head_dim: int, block: int, rope_dim: int | None) -> RecordLayout:
    try:
        format = KVFormat.parse(kv_format) if rope_dim is None else KVFormat.of_latents(kv_format)
        return RecordLayout.of(format, kv_heads, head_dim, block, rope_dim)
    except FormatError as error:
        raise SettingError(str(error)) from None
