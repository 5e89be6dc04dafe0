"""How much columns of experts' matrices matter: second moments of what reaches them in a calibration text.

Formats of few bits weigh the errors of second matrices by mean squares, as llama.cpp's importance matrices do, and in
first ones later columns make errors good (quant/error_feedback.py), for which a layer has one matrix of moments: those
of all its experts would be larger than they are. They are measured by passes in the checkpoint's own precision, in
which every expert's inputs are looked at; mean squares are kept with the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import save

from ...moe.expert import ExpertBody, ExpertGroups, ExpertSource, ResidentExpert
from ...offload.atomic_file import write_atomically
from ...quant.error_feedback import ErrorFeedback, feedback_nbytes
from ...quant.matmul.matmul import Matmul, Workspace
from ..model.experts_seam import PackedExperts
from ..model.runner import ModelRunner
from ..shape.model_shape import ModelShape
from .key_offsets import measure as pass_over

FILE = "note-importance.safetensors"
# Tokens of a pass: as many are one sequence, and each pass reads what memory does not hold.
WINDOW = 1024
# As many tokens of its layer's mean are counted for every expert: those that few tokens reach have little of their own.
PRIOR = 8


@dataclass(frozen=True, slots=True)
class Importance:
    """By layer, mean products of what reaches its experts [D, D], and mean squares of what reaches the second matrix of
    each [E, I], above 0; float32. `digest` identifies the text."""

    digest: str
    layers: Mapping[int, tuple[torch.Tensor, torch.Tensor]]

    @property
    def nbytes(self) -> int:
        """Those of the largest layer's feedback included, while it is made."""
        sizes = [(len(moments), moments.nbytes + down.nbytes) for moments, down in self.layers.values()]
        return sum(nbytes for _, nbytes in sizes) + max((feedback_nbytes(size) for size, _ in sizes), default=0)

    def of(self, layer: int) -> Iterator[tuple[ErrorFeedback, torch.Tensor]]:
        """Those of the columns of each expert's matrices; none where they were not measured."""
        if layer in self.layers:
            moments, down = self.layers[layer]
            feedback = ErrorFeedback.of(moments)
            yield from ((feedback, each) for each in down)


def moments_nbytes(shape: ModelShape) -> int:
    """What is added up for the first matrices of a model's experts."""
    return sum(4 * layer.experts.up.cols**2 for layer in shape.layers if layer.experts)


def digest_of(text: str) -> str:
    """Identifies a calibration text."""
    return sha256(text.encode()).hexdigest()[:16]


@dataclass(slots=True)
class _Observed:
    """An `ExpertSource` that adds up products of what reaches its experts, and squares of what reaches their second
    matrices."""

    source: ExpertSource
    body: ExpertBody
    compute: Matmul
    num_tokens: int = 0
    counts: torch.Tensor = field(init=False)
    sums: tuple[torch.Tensor, torch.Tensor] | None = None

    def __post_init__(self) -> None:
        self.counts = torch.zeros(self.num_experts, 1, dtype=torch.float64)

    @property
    def num_experts(self) -> int:
        return self.source.num_experts

    def foresee(self, hidden: torch.Tensor, per_token: int) -> tuple[torch.Tensor, ...]:
        return self.source.foresee(hidden, per_token)

    def fetch(self, groups: ExpertGroups, hidden: torch.Tensor, rows: torch.Tensor) -> Iterator[list[ResidentExpert]]:
        for residents in self.source.fetch(groups, hidden, rows):
            for one in residents:
                begin, count = groups.offsets[one.expert_id], groups.counts[one.expert_id]
                inputs = hidden[groups.token_ids[begin : begin + count]]
                self._add(one.expert_id, self.body.activated(inputs, one.weights, self.compute), hidden.shape[1])
            yield residents
        if self.sums is not None:
            inputs = hidden[: len(groups.expert_ids)].float()
            self.num_tokens += len(inputs)
            self.sums[0].addmm_(inputs.T, inputs)

    def _add(self, expert: int, inner: torch.Tensor, width: int) -> None:
        """`inner` [n, I] are rows of the expert's second matrix; its first one has `width` columns."""
        if self.sums is None:
            inners = torch.zeros(self.num_experts, inner.shape[1], dtype=torch.float64)
            self.sums = torch.zeros(width, width), inners
        self.counts[expert] += len(inner)
        self.sums[1][expert] += inner.double().square().sum(0)

    def means(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Mean products and mean squares; None where no token came."""
        if self.sums is None:
            return None
        products, inners = self.sums
        down = (inners + PRIOR * inners.sum(0) / self.counts.sum()) / (self.counts + PRIOR)
        with torch.inference_mode():
            return products.div_(self.num_tokens), _positive(down)


def _positive(means: torch.Tensor) -> torch.Tensor:
    """In float32; a column that nothing reaches counts for a millionth of the mean, or as others where none does."""
    least = float(means.mean()) * 1e-6
    return (means.clamp(min=least) if least else torch.ones_like(means)).float()


def measure(model: ModelRunner, workspace: Workspace, text: str, token_ids: Items[int]) -> Importance:
    """Measures them by passes over `token_ids`, those of the text; `workspace` is for one more product.

    Layers of which the passes computed no expert are left out.
    """
    compute = Matmul(workspace, deterministic=True)
    layers = enumerate(model.model.get_decoder().layers.children())
    found = {index: each for index, layer in layers for each in layer.modules() if isinstance(each, PackedExperts)}
    observed = {index: _Observed(each.source, each.body, compute) for index, each in found.items()}
    try:
        for index, module in found.items():
            module.source = observed[index]
        for begin in range(0, len(token_ids), WINDOW):
            pass_over(model, token_ids[begin : begin + WINDOW])
    finally:
        for index, module in found.items():
            module.source = observed[index].source
    means = {index: each.means() for index, each in observed.items()}
    return Importance(digest_of(text), {index: each for index, each in means.items() if each is not None})


def keep(store: Path, importance: Importance) -> None:
    """Writes mean squares into a store's folder."""
    tensors = {
        f"layers.{index}.{name}": each.contiguous()
        for index, (moments, down) in importance.layers.items()
        for name, each in (("up", moments.diagonal()), ("down", down))
    }
    write_atomically(store / FILE, save(tensors, {"text": importance.digest}))
