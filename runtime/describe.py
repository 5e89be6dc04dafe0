"""A checkpoint in a dozen numbers, from headers alone."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from ..quant.kv_format import KV_FORMATS
from .kv.spec import KVSpec
from .shape.layouts import FORMATS
from .shape.model_shape import ModelShape
from .shape.shards import weights_nbytes


@dataclass(frozen=True, slots=True)
class Description:
    """`weights` and `kv_per_token` are bytes by format."""

    model_type: str
    parameters: int
    active_parameters: int
    layers: int
    experts: int
    context: int
    weights: dict[str, int]
    kv_per_token: dict[str, float]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def describe(shape: ModelShape) -> Description:
    return Description(
        model_type=shape.model_type,
        parameters=shape.parameters,
        active_parameters=shape.active_parameters,
        layers=len(shape.layers),
        experts=shape.num_experts,
        context=shape.context,
        weights={quant: weights_nbytes(shape, quant, shape.dtype) for quant in FORMATS},
        kv_per_token={name: sum(KVSpec(group, name).token_nbytes for group in shape.kv_groups) for name in KV_FORMATS},
    )
