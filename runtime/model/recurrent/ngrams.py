"""The seam of layers that look n-grams up in a table: tokens before those of a pass, and a convolution with a state.

transformers' module keeps the last tokens and the convolution's inputs in its cache. Here the tokens are those of the
sequences themselves, which need no state: what is computed again, forked or continued has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ...engine.sequence import Batch
from .pass_states import PassStates


def adapt_ngrams(module: Any, states: PassStates, num_layers: int) -> None:
    """Gives a layer's lookup of n-grams the tokens and the states of passes.

    The states of its convolution are those of the layer behind all `num_layers` (shape/read.py).
    """
    embedding, layer = module.ple_embedding, num_layers + int(module.layer_idx)
    plain = embedding.forward

    def look_up(token_ids: torch.Tensor, cache: None) -> torch.Tensor:
        """token_ids [1, T] -> [1, T, E]: every token as a sequence of its own, with the tokens before it."""
        hashed = embedding.layer_multipliers.device
        before = tokens_before(states.batch, int(embedding.context_len), int(embedding.eos_token_id))
        # Rows of padding are not worth a read.
        found = plain(token_ids.T[: len(before)].to(hashed), _Before(before.to(hashed)))
        return F.pad(found.transpose(0, 1), (0, 0, 0, token_ids.shape[1] - len(before)))

    def convolve(rows: Sequence[torch.Tensor], state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, kept = rows[0].transpose(1, 2), int(module.short_conv_state_len)
        before = inputs.new_zeros(1, inputs.shape[1], kept) if state is None else state.to(inputs.dtype)
        whole = torch.cat([before, inputs], -1)
        return F.silu(module.conv1d(whole)).transpose(1, 2), whole[:, :, -kept:]

    def short_conv(hidden: torch.Tensor, cache: None) -> torch.Tensor:
        """hidden [1, T, C] -> [1, T, C]."""
        return states.run(states.pool.conv(layer), (hidden,), convolve, convolve)

    embedding.forward, module._short_conv = look_up, short_conv


def shed_hashes(model: nn.Module) -> None:
    """Leaves the numbers that hash n-grams, which modules compute from the configuration, out of what is stored."""
    for module in model.modules():
        if hasattr(module, "ngram_heads_offsets"):
            module._non_persistent_buffers_set |= module._buffers.keys()


def tokens_before(batch: Batch, count: int, filler: int) -> torch.Tensor:
    """The `count` tokens before each token of a pass, int64 [T, count], with `filler` before a sequence's first."""
    found = []
    for chunk in batch.chunks:
        known = chunk.sequence.tokens(max(0, chunk.past - count), chunk.end - chunk.begin + chunk.past - 1)
        missing = [filler] * max(0, count - chunk.past)
        found.append(np.lib.stride_tricks.sliding_window_view(np.array([*missing, *known]), count))
    return torch.from_numpy(np.concatenate(found))


class _Before:
    """What transformers' module gets as its cache: the tokens before each of its sequences."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._tokens = tokens

    def get_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._tokens

    def update_conv_state(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is kept."""
