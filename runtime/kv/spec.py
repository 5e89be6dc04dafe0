"""The memory layout of one layer group's keys and values. Torch-free, so that a planner can size caches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property

from ...quant.formats.format import FormatError
from ...quant.kv.format import KVFormat, RecordLayout
from ..settings.errors import SettingError
from ..shape.model_shape import KVGroup, StateGroup
from ..shape.shards import ITEM_NBYTES

BLOCK_TOKENS = 32


@dataclass(frozen=True)
class KVSpec:
    """One layer group in one format (a name of `KV_FORMATS`): a record is `block` tokens of one layer."""

    group: KVGroup
    format: str
    block: int = BLOCK_TOKENS

    @cached_property
    def layout(self) -> RecordLayout:
        """Raises SettingError for a format that cannot hold the group's heads."""
        return _layout(self.format, self.group, self.block)

    @cached_property
    def record_nbytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.layout.nbytes

    @cached_property
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
# States of a layer that are gathered at a time for one token of each sequence on a GPU; a CPU takes as many as its
# caches hold, because a step goes over them several times.
STEP_NBYTES = 64 << 20
CPU_STEP_NBYTES = 4 << 20
# A CPU gathers states of less than this, and changes larger ones where they are, a few in one call.
GATHERED_NBYTES = 256 << 10
# States of a layer from which on a CPU's threads share a step of one token of each sequence.
SHARED_STEP_NBYTES = 1 << 20
# The format of a scan's states by that of keys. Every token's rounding stays in a state, so they keep more bits.
_STATE_FORMATS = {"int8": "bf16", "int4": "int8"}
_STATE_NBYTES = {"fp32": 4, "bf16": 2, "int8": 1}


def state_format(kv: str, deterministic: bool) -> str:
    """The format of a scan's states beside a KV cache in the format `kv`: fp32, bf16 or int8.

    Deterministic runs keep float32: prompts may be cut anywhere there, and rounding at the cuts would show.
    """
    return "fp32" if deterministic else _STATE_FORMATS.get(kv.split("/", maxsplit=1)[0], "fp32")


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What a sequence keeps in recurrent layers; `dtype` (bf16, fp16, fp32) is that of the model's activations.

    `format` (fp32, bf16, int8) is that of a scan's states; int8 has a float32 scale for each last dimension.
    """

    groups: tuple[StateGroup, ...]
    dtype: str
    format: str = "fp32"

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's states, however long it is; 0 for a model without recurrent layers."""
        return sum(len(group.layers) * self.layer_nbytes(group) for group in self.groups)

    @property
    def largest_nbytes(self) -> int:
        """The same in the layer where they are the most, as it is computed: a scan in float32."""
        computed = StateSpec(self.groups, self.dtype)
        return max((computed.layer_nbytes(group) for group in self.groups), default=0)

    def layer_nbytes(self, group: StateGroup) -> int:
        """Bytes of one sequence's state in one layer of a group."""
        conv = math.prod(group.conv) * ITEM_NBYTES[self.dtype] if group.conv else 0
        recurrent = 0
        if group.recurrent:
            scales = 4 * math.prod(group.recurrent[:-1]) if self.format == "int8" else 0
            recurrent = math.prod(group.recurrent) * _STATE_NBYTES[self.format] + scales
        return conv + recurrent

    def pool_nbytes(self, live: int) -> int:
        """Bytes of the states of `live` sequences, and of one snapshot of a prefix for every eight of them.

        A single sequence shares its prefix with no other.
        """
        return (live + (-(-live // 8) if live > 1 else 0)) * self.nbytes


@cache
def _layout(kv_format: str, group: KVGroup, block: int) -> RecordLayout:
    try:
        format = _kv_format(kv_format, group)
        return RecordLayout.of(format, group.kv_heads, group.head_dim, block, group.value_dim)
    except FormatError as error:
        raise SettingError(str(error)) from None


def _kv_format(kv_format: str, group: KVGroup) -> KVFormat:
    if group.is_index:
        return KVFormat.of_index_keys(kv_format)
    return KVFormat.of_latents(kv_format) if group.is_latent else KVFormat.parse(kv_format)
