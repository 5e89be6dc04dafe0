"""Trains bfloat16 weights through float32 masters: Muon for matrices, AdamW for everything else.

Muon (Jordan 2024): momentum whose update is orthogonalized by a Newton-Schulz iteration, matrix by matrix;
an expert stack [num_experts, rows, cols] counts as num_experts matrices.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# The quintic's coefficients of the Muon source; they push every singular value near 1 in five rounds.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly: [..., rows, cols] -> same shape, bfloat16."""
    a, b, c = NEWTON_SCHULZ
    x: Tensor = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


@dataclass
class Trained:
    """A working weight, its float32 master, and Muon's momentum where Muon updates it."""

    weight: nn.Parameter
    master: Tensor
    momentum: Tensor | None


class MixedOptimizer:
    """Muon for attention and expert matrices, AdamW for embeddings, routers and norms."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], decay: float) -> None:
        self._decay = decay
        self._matrices: list[Trained] = []
        self._others: list[Trained] = []
        for name, weight in named:
            master = weight.detach().float().clone()
            if weight.ndim >= 2 and "embed" not in name and "mlp.gate." not in name:
                self._matrices.append(Trained(weight, master, torch.zeros_like(master)))
            else:
                self._others.append(Trained(weight, master.requires_grad_(), None))
        self._adamw = torch.optim.AdamW([t.master for t in self._others], betas=(0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def update(self, matrix_rate: float, other_rate: float) -> None:
        """Applies the gradients in the working weights at these learning rates and clears them."""
        for trained in self._matrices:
            self._update_matrix(trained, matrix_rate)
        for trained in self._others:
            trained.master.grad = _gradient(trained)
        self._adamw.param_groups[0]["lr"] = other_rate
        self._adamw.step()
        for trained in (*self._matrices, *self._others):
            trained.weight.copy_(trained.master)
            trained.weight.grad = None

    def _update_matrix(self, trained: Trained, rate: float) -> None:
        gradient, momentum = _gradient(trained), trained.momentum
        assert momentum is not None
        momentum.lerp_(gradient, 0.05)
        update = orthogonalize(gradient.lerp(momentum, 0.95)).float()
        rows, cols = update.shape[-2:]
        trained.master.mul_(1 - rate * self._decay)
        trained.master.add_(update, alpha=-rate * max(1.0, rows / cols) ** 0.5)


def _gradient(trained: Trained) -> Tensor:
    assert trained.weight.grad is not None
    return trained.weight.grad.float()
