"""Every kernel that attention may launch while a job runs, as launches that compute nothing. Imports Triton."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ....quant.kernels.launch import Launch
from .launch import Cached, attend_launches, store_launch
from .operands import Features, Pages
from .tuning import decode_cut, extend_cut, has_dot


class LayerSample(NamedTuple):
    """The operands of a layer's kernels for one row: k and v [1, H, D] to store, q [1, Hq, D] in their basis.

    `dtype` is the model's, which attention returns.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cached: Cached
    features: Features
    dtype: torch.dtype


def warm_up_launches(layers: Iterable[LayerSample], capability: tuple[int, int], tiled: bool) -> list[Launch]:
    """A launch of every kernel of these layers: store, decode without and with splits, their merge, and extend.

    Where `tiled`, extend replaces decode. Triton does not specialize kernels for anything else that changes in a job:
    tokens, sequences, their lengths, the number of splits, strides. The launches store no token and read none, so that
    they may run at any time between passes.
    """
    return [launch for layer in layers for launch in _launches(layer, capability, tiled)]


def _launches(layer: LayerSample, capability: tuple[int, int], tiled: bool) -> list[Launch]:
    q, device = layer.q, layer.q.device
    group, wide = q.shape[1] // layer.cached.kv_heads, layer.dtype == torch.float32
    # A token without a slot, and a tile without a position in the pass.
    nowhere = torch.full((1,), -1, dtype=torch.int64, device=device)
    nothing = torch.zeros(1, 5, dtype=torch.int32, device=device)
    pages = Pages(nothing[:, :1], nothing)
    out = torch.empty(q.shape, dtype=layer.dtype, device=device)
    launches = [store_launch(layer.k, layer.v, layer.cached, nowhere)]
    kinds = []
    if not tiled:
        decode = decode_cut(capability, q.shape[2], group, wide, layer.cached.kind)
        kinds += [(decode, 1), (decode, 2)]
    if has_dot(capability):
        kinds.append((extend_cut(q.shape[2], group, wide, layer.cached.is_mixed), 1))
    for cut, splits in kinds:
        launches += attend_launches(q, out, layer.cached, pages, layer.features, cut, splits)
    return launches
