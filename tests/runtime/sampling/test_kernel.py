"""The kernel that draws tokens, in Triton's interpreter, against the sampler's definition, which sorts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from moedge.runtime.sampling import kernel
from moedge.runtime.sampling.draw import NO_TOKEN, Draw, TokenHistory
from moedge.runtime.sampling.kernel import SIZES, RowSizes, draw, wrong_draw
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.sampling.sampler import Sampler, SamplerColumns, TokenMasks, choose

pytestmark = pytest.mark.numerics

# Rows of more than one chunk, the last of them not full.
VOCAB, ROWS, SMALL = 777, 12, RowSizes(8, 256)


def columns_of(seed: int, rows: int = ROWS) -> torch.Tensor:
    """Settings of every kind, each beside every other over a few seeds."""
    numbers = np.random.default_rng(seed)
    drawn = (
        numbers.choice([0.0001, 0.7, 1.0, 4.0], rows),
        numbers.choice([VOCAB, VOCAB, 40, 500, 1], rows),
        numbers.choice([1.0, 0.9, 0.3], rows),
        numbers.choice([0.0, 0.0, 0.02, 1.0], rows),
        numbers.random(rows),
    )
    return torch.tensor(np.stack(drawn)).unsqueeze(-1)


def logits_of(seed: int, ties: bool = False) -> torch.Tensor:
    numbers = np.random.default_rng(seed)
    found = torch.from_numpy(numbers.normal(0, numbers.choice([0.3, 2.0, 6.0], (ROWS, 1)), (ROWS, VOCAB))).float()
    return found.round() if ties else found


def defined(logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return choose(logits.float(), SamplerColumns(*columns))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "sizes", [SMALL, *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in (RowSizes(1, 1024), SIZES))]
)
def test_tokens_are_those_of_sorting(sizes: RowSizes, dtype: torch.dtype, ties: bool) -> None:
    """Of logits that are whole numbers, and of bfloat16, many tie: ids decide, also where top-k cuts."""
    seed = 2 * sizes.tried + ties
    logits, columns = logits_of(seed, ties).to(dtype), columns_of(seed)
    wanted = defined(logits, columns)
    assert torch.equal(draw(logits, columns, range(ROWS), sizes), wanted)
    assert len(wanted.unique()) > ROWS // 2


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_the_first_and_the_last_rank_can_be_drawn(uniform: float) -> None:
    logits, columns = logits_of(3), columns_of(3)
    columns[4] = uniform
    assert torch.equal(draw(logits, columns, range(ROWS), SMALL), defined(logits, columns))


def test_forbidden_tokens_are_never_drawn_and_broken_rows_have_none() -> None:
    logits, columns = logits_of(4), columns_of(4)
    logits[:, ::2] = -torch.inf
    logits[3, 5], logits[4, 7], logits[5] = torch.nan, torch.inf, -torch.inf
    # All that is allowed is less than top-k.
    logits[6, 9:] = -torch.inf
    found = draw(logits, columns, range(ROWS), SMALL)
    assert torch.equal(found, defined(logits, columns))
    assert found[3:6].tolist() == [NO_TOKEN] * 3
    assert (found[found != NO_TOKEN] % 2 == 1).all()


def test_some_rows_of_a_pass_are_drawn_where_they_are() -> None:
    logits, rows = logits_of(5), [11, 3, 3, 0]
    columns = columns_of(5, len(rows))
    padded = torch.nn.functional.pad(logits, (0, 3), value=9.0)[:, :VOCAB]
    assert torch.equal(draw(padded, columns, rows, SMALL), defined(logits[rows], columns))


@pytest.fixture
def samplers(monkeypatch: pytest.MonkeyPatch) -> tuple[Sampler, Sampler, list[int]]:
    """One that draws by the kernel, one that sorts, and how many rows each launch of the kernel had."""
    drawn: list[int] = []

    def counted(logits: torch.Tensor, columns: torch.Tensor, rows: Any) -> torch.Tensor:
        drawn.append(len(rows))
        return draw(logits, columns, rows, SMALL)

    # Two rows that are copied make a tile.
    return Sampler(2 * 16 * VOCAB, counted), Sampler(), drawn


def test_a_sampler_copies_only_rows_whose_logits_change(samplers: tuple[Sampler, Sampler, list[int]]) -> None:
    by_kernel, by_sorting, drawn = samplers
    history = TokenHistory([5, 9, 9])
    kinds: list[Callable[[int], Draw]] = [
        lambda row: Draw(SequenceSampling(9, temperature=0.8, top_p=0.9, seed=row), 0, row),
        lambda row: Draw(SequenceSampling(9, temperature=0.0), 0, row),
        lambda row: Draw(SequenceSampling(9, temperature=1.2, repetition_penalty=1.3, seed=row), 0, row, history),
        lambda row: Draw(SequenceSampling(9, temperature=1.0, logit_bias=((7, 3.0),), seed=row), 1, row),
    ]
    draws = [kinds[row % 4](row) for row in range(ROWS)]
    masks = TokenMasks([0, 2], torch.full((2, 98), 0x55, dtype=torch.uint8))
    logits = logits_of(6).bfloat16()
    found = by_kernel.sample(logits, draws, masks).token_ids
    assert found.tolist() == by_sorting.sample(logits, draws, masks).token_ids.tolist()
    # Rows 4 and 8 as they are, in one launch; 3, 6, 7, 10, 11 changed and 0, 2 masked, two by two.
    assert drawn == [2, 2, 2, 1, 2]


def test_a_device_that_draws_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "VOCAB", 97)
    monkeypatch.setattr(draw, "__defaults__", (RowSizes(64, 64),))
    assert wrong_draw(torch.device("cpu")) == ""
    right = kernel.draw

    def late(logits: torch.Tensor, columns: torch.Tensor, rows: Any) -> torch.Tensor:
        columns = columns.clone()
        columns[4] = 1 - columns[4]
        return right(logits, columns, rows)

    monkeypatch.setattr(kernel, "draw", late)
    assert wrong_draw(torch.device("cpu")).startswith("drawing tokens: ")
