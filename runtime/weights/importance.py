"""How much columns of experts' matrices matter: mean squares of what reaches them in a calibration text.

Formats of few bits weigh the errors of a matrix by them, as llama.cpp's importance matrices do. They are measured by
passes in the checkpoint's own precision, in which every expert's inputs are looked at, and kept with the store.
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
from ...quant.matmul.matmul import Matmul, Workspace
from ..model.experts_seam import PackedExperts
from ..model.runner import ModelRunner
from .key_offsets import measure as pass_over

FILE = "note-importance.safetensors"
# Tokens of a pass: as many are one sequence, and each pass reads what memory does not hold.
WINDOW = 1024
# As many tokens of its layer's mean are counted for every expert: those that few tokens reach have little of their own.
PRIOR = 8


@dataclass(frozen=True, slots=True)
class Importance:
    """By layer, of experts' first matrices [E, D] and second ones [E, I]: float32, above 0. `digest` identifies the
    text."""

    digest: str
    layers: Mapping[int, tuple[torch.Tensor, torch.Tensor]]

    def of(self, layer: int, expert: int) -> list[torch.Tensor]:
        """Those of the columns of one expert's matrices; none where they were not measured."""
        return [each[expert] for each in self.layers.get(layer, ())]


def digest_of(text: str) -> str:
    """Identifies a calibration text."""
    return sha256(text.encode()).hexdigest()[:16]


@dataclass(slots=True)
class _Observed:
    """An `ExpertSource` that adds up the squares of what reaches the matrices of its experts."""

    source: ExpertSource
    body: ExpertBody
    compute: Matmul
    counts: torch.Tensor = field(init=False)
    sums: list[torch.Tensor] = field(default_factory=list)

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
                self._add(one.expert_id, inputs, self.body.activated(inputs, one.weights, self.compute))
            yield residents

    def _add(self, expert: int, *inputs: torch.Tensor) -> None:
        """`inputs` [n, D] and [n, I] are rows of the expert's first and second matrix."""
        self.sums = self.sums or [torch.zeros(self.num_experts, each.shape[1], dtype=torch.float64) for each in inputs]
        self.counts[expert] += len(inputs[0])
        for total, each in zip(self.sums, inputs, strict=True):
            total[expert] += each.double().square().sum(0)

    def means(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of both matrices; None where no token came."""
        if not self.sums:
            return None
        up, down = ((total + PRIOR * total.sum(0) / self.counts.sum()) / (self.counts + PRIOR) for total in self.sums)
        return _positive(up), _positive(down)


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
    """Writes them into a store's folder."""
    tensors = {
        f"layers.{index}.{name}": each.contiguous()
        for index, pair in importance.layers.items()
        for name, each in zip(("up", "down"), pair, strict=True)
    }
    write_atomically(store / FILE, save(tensors, {"text": importance.digest}))
