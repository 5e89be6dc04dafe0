"""The constants of passes on a GPU (`runtime/plan/presets.py`) are what this code does: launches, tiles of the
sampler, bytes of torch.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moedge.quant.formats.format import ASSUMED
from moedge.quant.matmul.matmul import Matmul, Workspace
from moedge.quant.scratch import scratch_nbytes
from moedge.quant.tensor import pack
from moedge.runtime.plan import presets
from moedge.runtime.sampling.draw import Draw
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.sampling.sampler import BYTES_PER_LOGIT, Sampler

VIEWS = {
    "view", "_unsafe_view", "slice", "select", "t", "transpose", "unsqueeze", "unbind", "as_strided", "expand",
    "permute", "alias", "detach", "reshape", "squeeze", "split", "empty", "new_empty", "empty_like", "narrow",
}  # fmt: skip
# Gate and up of an expert of Qwen3-30B-A3B, and its last matrix.
EXPERT = ((1536, 2048), (2048, 768))


class Counted(TorchDispatchMode):
    """Counts operations that compute, and the bytes of what they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.nbytes = 0, 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if op.__name__.split(".")[0] not in VIEWS:
            self.launches += 1
            read = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, torch.Tensor)]
            made = [result] if isinstance(result, torch.Tensor) else []
            pointers = {each.data_ptr() for each in read}
            tensors = read + [each for each in made if each.data_ptr() not in pointers]
            self.nbytes += sum(each.numel() * each.element_size() for each in tensors)
        return result


def test_a_tile_of_the_sampler_starts_as_many_kernels() -> None:
    sampler, vocab = Sampler(), 32000
    rows = presets.SAMPLER_LOGITS // vocab
    assert sampler.scratch_nbytes // BYTES_PER_LOGIT == presets.SAMPLER_LOGITS
    draw = Draw(SequenceSampling(16, temperature=0.6, top_p=0.95, top_k=20), 0, 3)
    found = []
    for tiles in (1, 2):
        with torch.inference_mode(), Counted() as counted:
            sampler.sample(torch.randn(tiles * rows, vocab).bfloat16(), [draw] * tiles * rows)
        found.append(counted.launches)
    assert found[1] - found[0] == pytest.approx(presets.SAMPLER_LAUNCHES, abs=2)
    assert presets.sampling_s(2 * rows, vocab) == 2 * presets.SAMPLER_LAUNCHES * presets.LAUNCH_S


def test_a_layer_starts_as_many_kernels() -> None:
    counts = json.loads((Path(__file__).parents[2] / "device" / "host_cost.json").read_text())["figures"]
    assert counts["all"]["prompts"]["layer"][2] == presets.LAYER_LAUNCHES
    torch_s = counts["held, no kernels"]["decode"]["layer"][2] / counts["held"]["decode"]["layer"][2]
    assert torch_s == pytest.approx(presets.TORCH_ATTENTION, abs=0.05)


@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
def test_torch_moves_as_many_bytes_for_a_weight(quant: str) -> None:
    """With few rows, so that activations hardly count. nf4 and mxfp4 are unpacked by calls that aten does not see."""
    numel, nbytes = 0, 0
    for shape in EXPERT:
        packed = pack(torch.randn(shape).bfloat16(), quant)
        multiply = Matmul(Workspace(scratch_nbytes(packed.layout, "bfloat16", False)), gemv_max_rows={})
        x = torch.randn(4, shape[1]).bfloat16()
        with torch.inference_mode(), Counted() as counted:
            multiply._multiply_strips(x, packed, x.new_empty(4, shape[0]))
        numel, nbytes = numel + shape[0] * shape[1], nbytes + counted.nbytes
    assert nbytes / numel == pytest.approx(ASSUMED[quant].dense_nbytes, rel=0.05)
