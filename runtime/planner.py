"""Chooses precision and sizes for a model, a job and the memory that is there. Closed form, torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .errors import DoesNotFit, SettingError
from .kv.spec import BLOCK_TOKENS, KVSpec
from .shape.layouts import FORMATS
from .shape.model_shape import ModelShape
from .shape.shards import weights_nbytes

GIB = 1 << 30
# torch, transformers and bitsandbytes imported, before any model: measured 0.39 GiB.
PROCESS_NBYTES = int(0.5 * GIB)
# Of the memory that weights leave, what auto gives to the KV cache; the rest is for activations and logits.
KV_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for; "auto" is decided by `make_plan`, everything else is a fixed point."""

    dtype: str = "auto"
    quant: str = "auto"
    kv: str = "auto"
    tokens_per_pass: int = 1024
    max_sequences: int = 128
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What will run: no field is left to be decided later. Sizes in bytes."""

    dtype: str
    quant: str
    kv: str
    kv_block: int
    kv_blocks: int
    tokens_per_pass: int
    max_sequences: int
    deterministic: bool
    weights_nbytes: int
    kv_nbytes: int
    available_nbytes: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that the cache holds; a sequence that could grow longer is never started."""
        return self.kv_blocks * self.kv_block

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(shape: ModelShape, settings: Settings, available: int, longest: int | None = None) -> Plan:
    """The plan for `available` bytes of host memory and sequences of at most `longest` tokens (None: the context).

    Raises DoesNotFit, naming what would be needed.
    """
    if min(settings.tokens_per_pass, settings.max_sequences) < 1:
        raise SettingError("--tokens-per-pass and --max-sequences must be at least 1")
    dtype = shape.dtype if settings.dtype == "auto" else settings.dtype
    kv = dtype if settings.kv == "auto" else settings.kv
    specs = [KVSpec(group, kv) for group in shape.kv_groups]
    block_nbytes = sum(spec.block_nbytes for spec in specs)
    room = available - PROCESS_NBYTES
    quant, weights = _choose_quant(shape, settings.quant, dtype, room - block_nbytes)
    wanted_blocks = min(settings.max_sequences, settings.tokens_per_pass) * specs[0].blocks_for(
        longest or shape.context
    )
    kv_blocks = min(wanted_blocks, int((room - weights) * KV_SHARE) // block_nbytes)
    if kv_blocks < 1:
        raise DoesNotFit(
            f"{_gib(weights)} of weights ({quant}) leave no room for one KV block in {_gib(available)} of host "
            f"memory; {_gib(weights + PROCESS_NBYTES + 4 * block_nbytes)} would do. Free memory, or choose --quant nf4."
        )
    return Plan(
        dtype=dtype,
        quant=quant,
        kv=kv,
        kv_block=BLOCK_TOKENS,
        kv_blocks=kv_blocks,
        tokens_per_pass=settings.tokens_per_pass,
        max_sequences=settings.max_sequences,
        deterministic=settings.deterministic,
        weights_nbytes=weights,
        kv_nbytes=kv_blocks * block_nbytes,
        available_nbytes=available,
    )


def _choose_quant(shape: ModelShape, wanted: str, dtype: str, room: int) -> tuple[str, int]:
    """The least lossy format that fits `room` bytes, or the one that was asked for, and its size."""
    if wanted != "auto":
        return wanted, weights_nbytes(shape, wanted, dtype)
    for quant in FORMATS:
        nbytes = weights_nbytes(shape, quant, dtype)
        if nbytes <= room:
            break
    return quant, nbytes


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
