"""Norms in pieces (`runtime/model/weights_seam.py`): the same bits, the same modules, and only those that treat rows
alike.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from moedge.runtime.model.weights_seam import norm_in_pieces

pytestmark = pytest.mark.numerics

WIDTH = 48
NORMS: dict[str, Callable[[], nn.Module]] = {
    "rms": lambda: Qwen3MoeRMSNorm(WIDTH),
    "rms of gemma": lambda: Gemma3RMSNorm(WIDTH),
    "layer": lambda: nn.LayerNorm(WIDTH),
    "layer of cohere": lambda: CohereLayerNorm(WIDTH),
}


class Watched(nn.Module):
    """A norm that says how many rows it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.numel() // x.shape[-1])
        return x + 1


class WatchedNorm(Watched):
    pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("shape", [(1, 23, WIDTH), (1, 7, 3, WIDTH), (23, WIDTH)])
def test_pieces_have_the_bits_of_the_whole(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    norm = NORMS[name]().to(dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = norm(x)
    assert norm_in_pieces(norm, 4 * WIDTH + 1) == 1
    assert torch.equal(norm(x), whole)


def test_a_large_input_comes_in_pieces_and_a_small_one_whole() -> None:
    norm = WatchedNorm()
    norm_in_pieces(norm, 4 * WIDTH)
    x = torch.zeros(1, 10, WIDTH)
    assert torch.equal(norm(x), x + 1)
    norm(x[:, :4])
    # What is not contiguous would have to be copied.
    norm(torch.zeros(1, WIDTH, 10).transpose(1, 2))
    assert norm.seen == [4, 4, 2, 4, 10]


def test_what_may_mix_rows_is_left_alone() -> None:
    """A norm with a weight for every head, modules that are no norms, and norms over other axes."""
    heads = CohereLayerNorm((4, WIDTH))
    assert norm_in_pieces(nn.ModuleList([heads, Watched(), nn.GroupNorm(2, 4), nn.BatchNorm1d(4)])) == 0
