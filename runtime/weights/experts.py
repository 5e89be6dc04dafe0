"""Gives every layer the source of its experts: memory where all are held, else the cache that streams the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...moe.expert import ExpertWeights, HeldExperts
from ...moe.expert_cache import StreamedExperts, StreamingExpertCache
from ...moe.forecast import Forecast, LookAhead
from ...moe.routing_stats import RoutingStats
from ...moe.slots import ExpertSlots
from ...moe.streaming_mode import ExpertOptions, ModeChoice, RouterLatency
from ...moe.streaming_order import ExpertFetchQueue, StreamingOrder
from ...offload.stream.lane import ShardKey
from ...offload.stream.stream import ShardStream
from ..model.assembly import LayerAssembly
from .lanes import Lanes
from .memory import WeightMemory
from .routing_profile import Profile


class ModelExperts:
    """The experts of all layers. `cache` streams them; it is None where all experts are held."""

    def __init__(
        self,
        memory: WeightMemory,
        lanes: Lanes,
        layers: Sequence[LayerAssembly],
        options: ExpertOptions,
        live: int,
        profile: Profile,
    ) -> None:
        """`live` is the expected number of tokens of a pass; `profile` is what earlier jobs counted."""
        self._memory = memory
        self._lanes = lanes
        self._layers = layers
        self._options = options
        counts = {index: layer.shards.num_experts for index, layer in enumerate(layers) if layer.shards.num_experts}
        self.stats = RoutingStats(counts, "cpu" if memory.device is None else memory.device.place)
        self._profile = profile
        self._start_from_profile()
        self.cache = None if lanes.experts is None else self._make_cache(lanes.experts, live)
        for index, count in counts.items():
            layers[index].set_experts(self._source(index, count))

    @property
    def num_held(self) -> int:
        """The number of experts of all layers that are held where they compute."""
        return sum(key in self._memory.held for key in self._memory.experts)

    @property
    def observed(self) -> Profile:
        """The counts that this job adds to the profile."""
        return {name: counts - self._profile.get(name, 0.0) for name, counts in self._counts().items()}

    def start_counting(self) -> None:
        """Passes so far do not belong to the job: a rehearsal ran them with made-up rows."""
        self._start_from_profile()
        self.stats.start_counting()
        if self.cache is not None:
            self.cache.start_counting()

    def _counts(self) -> Profile:
        found = {f"layers.{layer}.follows": table.cpu() for layer, table in self.stats.affinity.follows.items()}
        for layer, stats in self.stats.popularity.layers.items():
            found[f"layers.{layer}.chosen"] = torch.from_numpy(stats.chosen.copy())
            found[f"layers.{layer}.tokens"] = torch.tensor([stats.tokens], dtype=torch.float64)
        return found

    def _start_from_profile(self) -> None:
        for layer, stats in self.stats.popularity.layers.items():
            chosen = self._profile.get(f"layers.{layer}.chosen")
            stats.chosen[:] = 0.0 if chosen is None else chosen.numpy()
            stats.tokens = 0.0 if chosen is None else float(self._profile[f"layers.{layer}.tokens"])
        for layer, table in self.stats.affinity.follows.items():
            before = self._profile.get(f"layers.{layer}.follows")
            table.zero_() if before is None else table.copy_(before)

    def _source(self, index: int, count: int) -> HeldExperts | StreamedExperts:
        if self.cache is not None:
            return StreamedExperts(index, count, self.cache)
        keys = [ShardKey(index, expert) for expert in range(count)]
        return HeldExperts(index, [self._bind(key, self._memory.shard(key)) for key in keys], self.stats)

    def _make_cache(self, stream: ShardStream[torch.Tensor], live: int) -> StreamingExpertCache:
        held = [key for key in self._memory.experts if key in self._memory.held]
        popularity = self.stats.popularity.layers
        sizes = {layer: self._memory.nbytes(ShardKey(layer, 0)) for layer in popularity}
        probabilities = {layer: stats.wanted_by(live) for layer, stats in popularity.items()}
        slots = ExpertSlots(held, self._memory, self._bind, self._options.policy(held, sizes, probabilities))
        largest = max(sizes.values())
        order = StreamingOrder(
            ExpertFetchQueue(stream, self._lanes.shard),
            slots.held,
            ModeChoice(self.stats, self._options.stream),
            Forecast(self.stats, LookAhead(self._routers())),
            RouterLatency(
                lambda: stream.seconds_busy, lambda: stream.nbytes_moved, lambda: stream.seconds_waited, largest
            ),
            most_ahead=stream.capacity // largest + 1,
        )
        return StreamingExpertCache(self.stats, order, slots)

    def _routers(self) -> dict[int, torch.Tensor]:
        routers = {layer: self._layers[layer].router for layer in self.stats.layers}
        return {layer: router for layer, router in routers.items() if router is not None}

    def _bind(self, key: ShardKey, view: torch.Tensor) -> ExpertWeights:
        return self._layers[key.layer].bind_expert(key.expert, view)
