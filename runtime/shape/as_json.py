"""A ModelShape as JSON and back, so that a store tells its shape without the checkpoint it was made from."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .model_shape import ExpertsShape, KVGroup, LayerShape, Matrix, ModelShape


def shape_to_json(shape: ModelShape) -> dict[str, Any]:
    return asdict(shape)


def shape_from_json(values: dict[str, Any]) -> ModelShape:
    """Raises KeyError or TypeError for anything that `shape_to_json` did not write."""
    return ModelShape(
        **{
            **values,
            "layers": tuple(_layer(layer) for layer in values["layers"]),
            "kv_groups": tuple(KVGroup(**{**group, "layers": tuple(group["layers"])}) for group in values["kv_groups"]),
            "head": Matrix(**values["head"]) if values["head"] else None,
        }
    )


def _layer(values: dict[str, Any]) -> LayerShape:
    experts = values["experts"]
    if experts is not None:
        experts = ExpertsShape(**{**experts, "up": Matrix(**experts["up"]), "down": Matrix(**experts["down"])})
    return LayerShape(**{**values, "dense": tuple(Matrix(**matrix) for matrix in values["dense"]), "experts": experts})
