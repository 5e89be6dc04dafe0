"""Bytes per token of real models are those that the field counts with."""

import pytest

from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.shape.model_shape import KVGroup
from support.known_shapes import known_shape

KIB = 1024
# Layers, KV heads, head size; KiB per token over all layers with scales: two groups of a head in int4.
MODELS = {
    "Qwen3-30B-A3B": ((48, 4, 128), {"bf16": 96, "int8": 48.75, "int4": 27.0}),
    "Mixtral-8x7B": ((32, 8, 128), {"bf16": 128, "int8": 65.0, "int4": 36.0}),
    "gpt-oss-20b": ((24, 8, 64), {"bf16": 48, "int8": 24.75, "int4": 15.0}),
}


@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize("name", MODELS)
def test_bytes_per_token(name: str, block: int) -> None:
    (layers, heads, head_dim), wanted = MODELS[name]
    group = KVGroup(tuple(range(layers)), heads, head_dim, None)
    for kv, kib in wanted.items():
        assert KVSpec(group, kv, block).token_nbytes / KIB == pytest.approx(kib, rel=0.01)


# Elements per token and layer that DeepSeek-V2 (arXiv 2405.04434, table 1) gives for latent attention: the latent's and
# the rotated key's. Bytes per token in 8 bits with two scales of 16 bits, in 4 bits with two groups of the latent.
LATENT = {"bf16": (512 + 64) * 2, "int8": 512 + 2 + 64 + 2, "int4": 256 + 8 + 64 + 2}


@pytest.mark.parametrize(("name", "layers", "parameters"), [("DeepSeek-V3", 61, 671e9), ("GLM-4.7-Flash", 47, 30e9)])
def test_bytes_per_token_of_latents(name: str, layers: int, parameters: float) -> None:
    shape = known_shape(name)
    assert shape.parameters == pytest.approx(parameters, rel=0.01)
    (group,) = shape.kv_groups
    for kv, nbytes in LATENT.items():
        assert KVSpec(group, kv).token_nbytes == layers * nbytes
    assert KVSpec(group, "bf16").record_nbytes == 32 * 1152


@pytest.mark.parametrize(
    ("kv", "nbytes"), [("bf16", 256), ("fp32", 512), ("int8", 130), ("int8/int4", 130), ("int4", 130)]
)
def test_bytes_per_token_of_an_indexer(kv: str, nbytes: int) -> None:
    """Of DeepSeek-V3.2: one key of 128 elements, which keeps 8 bits, and no value."""
    spec = KVSpec(KVGroup((0, 1), 1, 128, None, chosen=2048), kv)
    assert spec.token_nbytes == 2 * nbytes


@pytest.mark.parametrize(("kv", "share"), [("bf16", 0), ("int8", 2 / 130), ("int4", 8 / 72)])
def test_share_of_scales(kv: str, share: float) -> None:
    """For each head of 128 elements: int8 has one of 16 bits, int4 two groups with a scale and a zero each."""
    assert KVSpec(KVGroup((0,), 4, 128, None), kv).scale_fraction == pytest.approx(share)
