"""What names an expert of a model. Torch-free."""

from __future__ import annotations

from typing import NamedTuple


class ExpertKey(NamedTuple):
    """Expert `expert` of layer `layer`, as the model counts its layers."""

    layer: int
    expert: int
