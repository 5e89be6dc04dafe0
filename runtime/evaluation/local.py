"""Local errors: what an engine's layers return beside what a reference computes from the same input.

A layer that gets what the engine's layer got differs from it by that layer's rounding alone. From end to end rounding
adds up, and in a mixture it chooses other experts where a router's scores are nearly equal, after which all numbers
differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# How often a layer is computed from shaken states, and how often each sequence is computed in all.
_SHAKEN = 2
_TIMES = 2 + _SHAKEN


class LocalErrors:
    """Lets a reference compute each layer from an engine's hidden states, beside its own.

    `hidden` [L, S, T, D] is what the engine's layers returned; `chosen` has for each layer the experts of every token
    [S, T, K], -1 where there are fewer, or None. `roundoff` is the unit of roundoff of the engine's dtype.

    After a pass over `repeat(token_ids)` there are for each layer, over tokens [S, T]: in `relative` the L2 differences
    of hidden states, relative to the larger of what goes into the layer and what comes out; in `shaken` by how much the
    reference's own change if its input changes by at most one unit of roundoff; `rerouted` is where the engine chose
    other experts than the reference did.
    """

    def __init__(self, hidden: Tensor, chosen: Sequence[Tensor | None], roundoff: float) -> None:
        self.relative: list[Tensor] = []
        self.shaken: list[Tensor] = []
        self.rerouted: list[Tensor] = []
        self._hidden = hidden
        self._chosen = chosen
        self._roundoff = roundoff
        self._count = hidden.shape[1]
        self._random = torch.Generator().manual_seed(0)
        self._input = torch.empty(0)
        # The experts of a layer [2 + shaken, S, T, K] that the reference chose.
        self._routed: Tensor | None = None

    def repeat(self, token_ids: Tensor) -> Tensor:
        """token_ids [S, T] once for the reference's own pass, and for what is computed beside it."""
        return token_ids.repeat(_TIMES, 1)

    def watch(self, layers: Sequence[nn.Module]) -> None:
        """Hooks the reference's layers. What is behind the last one gets 2 * S sequences, the reference's and the
        engine's."""
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True)
            for module in layer.modules():
                if type(module).__name__ == "Llama4Router":
                    # In this family all experts compute all tokens, most of them on zeros.
                    module.register_forward_hook(lambda router, _, out: self._route(out[1].topk(router.top_k).indices))
                elif getattr(getattr(module, "down_proj", None), "ndim", 0) == 3:
                    module.register_forward_pre_hook(self._choose, with_kwargs=True)
            layer.register_forward_hook(partial(self._leave, index, index == len(layers) - 1))

    def _enter(self, index: int, layer: nn.Module, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        hidden = (args[0] if args else named["hidden_states"]).detach()
        own = hidden[: self._count]
        given = self._hidden[index - 1].to(own.dtype) if index else own
        hidden = torch.cat([own, given, *(self._shake(given) for _ in range(_SHAKEN))])
        self._input, self._routed = given, None
        return ((hidden, *args[1:]), named) if args else (args, {**named, "hidden_states": hidden})

    def _shake(self, states: Tensor) -> Tensor:
        noise = torch.rand(states.shape, generator=self._random) * 2 - 1
        return states * (1 + noise * self._roundoff)

    def _choose(self, experts: Any, args: Any, named: dict[str, Any]) -> None:
        given = (*args, *named.values())
        if len(given) == 3:
            # Choices behind the matrices return their input.
            self._route(given[1].masked_fill(given[1] >= len(experts.down_proj), -1))

    def _route(self, chosen: Tensor) -> None:
        shape = (_TIMES, *self._hidden.shape[1:3])
        if chosen.numel() and len(chosen) == shape[0] * shape[1] * shape[2]:
            self._routed = chosen.reshape(*shape, -1)[1:]

    def _leave(self, index: int, last: bool, layer: nn.Module, args: Any, out: Any) -> Any:
        states, found = hidden_of(out).detach(), self._hidden[index]
        own, wanted, *shaken = states.reshape(_TIMES, self._count, *states.shape[1:])
        size = torch.maximum(wanted.norm(dim=-1), self._input.norm(dim=-1))
        self.relative.append((found - wanted).norm(dim=-1) / size)
        moved = torch.stack([(each - wanted).norm(dim=-1) / size for each in shaken])
        rerouted = torch.zeros(found.shape[:2], dtype=torch.bool)
        if self._routed is not None:
            moved[_differ(self._routed[1:], self._routed[0])] = 0
            chosen = self._chosen[index]
            if chosen is not None and chosen.shape == self._routed[0].shape:
                rerouted = _differ(chosen, self._routed[0])
        self.shaken.append(moved.amax(0))
        self.rerouted.append(rerouted)
        if not last:
            return None
        states = torch.cat([own, found.to(own.dtype)])
        return (states, *out[1:]) if isinstance(out, tuple) else states


def _differ(chosen: Tensor, others: Tensor) -> Tensor:
    """Where two choices [..., K] of experts differ, in whatever order they are."""
    return (chosen.sort(-1).values != others.sort(-1).values).any(-1)


def hidden_of(out: Any) -> Tensor:
    """The hidden states among what a decoder layer returned."""
    states: Tensor = out[0] if isinstance(out, tuple) else out
    return states
