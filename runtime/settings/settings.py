"""How a model is to be computed: what the user fixes, and what is left to the planner. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The planner decides what is "auto" or None; it keeps every other value as it is.

    `dtype` is the dtype to compute in, `quant` the format of the weights, `kv` that of keys and values. `compute`
    "int8" rounds activations, too, and multiplies as integers, which takes weights in int8 or 4 bits; "float" does not.
    """

    dtype: str = "auto"
    quant: str = "auto"
    kv: str = "auto"
    tokens_per_pass: int | None = None
    max_sequences: int | None = None
    deterministic: bool = False
    compute: str = "auto"
    attention: str = "auto"
