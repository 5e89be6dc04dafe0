"""Gives every layer's experts their source: memory where all are held, else the cache that streams the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...moe.affinity import Affinity
from ...moe.expert import ExpertWeights, HeldExperts
from ...moe.fetch_queue import ExpertFetchQueue
from ...moe.forecast import Forecast, LookAhead
from ...moe.policy import ExpertKey
from ...moe.popularity import Popularity
from ...moe.slots import ExpertSlots
from ...moe.streaming import ExpertSupply, StreamedExperts
from ...moe.streaming_mode import ExpertOptions, ModeChoice, RouterLatency
from ...offload.stream.lane import Shard
from ..model.assembly import LayerAssembly
from .lanes import Lanes
from .memory import ShardKey, WeightMemory
from .routing_profile import Profile


class ModelExperts:
    """The experts of all layers; `supply` streams them, and is None where all of them are held."""

    def __init__(
        self,
        memory: WeightMemory,
        lanes: Lanes,
        layers: Sequence[LayerAssembly],
        options: ExpertOptions,
        live: int,
        profile: Profile,
    ) -> None:
        """`live` is the expected number of tokens of a pass; `profile` has the routing counts of earlier jobs."""
        self._memory = memory
        self._lanes = lanes
        self._layers = layers
        self._options = options
        counts = {index: layer.shards.num_experts for index, layer in enumerate(layers) if layer.shards.num_experts}
        self.popularity = Popularity(counts)
        self.affinity = Affinity(counts, "cpu" if memory.device is None else memory.device.torch_device)
        self._profile = profile
        self._start_from_profile()
        self.supply = self._open_supply(live)
        for index, count in counts.items():
            layers[index].set_experts(self._source(index, count))

    @property
    def num_held(self) -> int:
        """The number of experts that are held where they compute, over all layers."""
        return sum(key in self._memory.held for key in self._memory.experts)

    @property
    def observed(self) -> Profile:
        """The counts that this job adds to the profile."""
        return {name: counts - self._profile.get(name, 0.0) for name, counts in self._counts().items()}

    def start_counting(self) -> None:
        """Forgets the counts of passes so far: a rehearsal's invented rows do not belong to the job."""
        self._start_from_profile()
        self.popularity.start_counting()
        if self.supply is not None:
            self.supply.start_counting()

    def _counts(self) -> Profile:
        counts = {f"layers.{layer}.follows": table.cpu() for layer, table in self.affinity.follows.items()}
        for layer, stats in self.popularity.layers.items():
            counts[f"layers.{layer}.chosen"] = torch.from_numpy(stats.chosen.copy())
            counts[f"layers.{layer}.tokens"] = torch.tensor([stats.tokens], dtype=torch.float64)
        return counts

    def _start_from_profile(self) -> None:
        for layer, stats in self.popularity.layers.items():
            chosen = self._profile.get(f"layers.{layer}.chosen")
            stats.chosen[:] = 0.0 if chosen is None else chosen.numpy()
            stats.tokens = 0.0 if chosen is None else float(self._profile[f"layers.{layer}.tokens"])
        for layer, table in self.affinity.follows.items():
            before = self._profile.get(f"layers.{layer}.follows")
            table.zero_() if before is None else table.copy_(before)

    def _source(self, index: int, count: int) -> HeldExperts | StreamedExperts:
        if self.supply is not None:
            return StreamedExperts(index, count, self.supply)
        keys = [ExpertKey(index, expert) for expert in range(count)]
        return HeldExperts(index, [self._bind(key, self._held(key)) for key in keys], self.popularity, self.affinity)

    def _open_supply(self, live: int) -> ExpertSupply | None:
        stream = self._lanes.experts
        if stream is None:
            return None
        held = {ExpertKey(*key): self._memory.shard(key) for key in self._memory.experts if key in self._memory.held}
        sizes = {layer: self._memory.nbytes(ShardKey(layer, 0)) for layer in self.popularity.layers}
        probabilities = {layer: stats.wanted_by(live) for layer, stats in self.popularity.layers.items()}
        largest = max(sizes.values())
        return ExpertSupply(
            ExpertFetchQueue(stream, self._shard),
            ExpertSlots(held, self._bind, self._move_out),
            self._options.policy(held, sizes, probabilities),
            ModeChoice(self.popularity, self._options.stream),
            Forecast(self.popularity, self.affinity, LookAhead(self._routers())),
            RouterLatency(
                lambda: stream.seconds_busy, lambda: stream.nbytes_moved, lambda: stream.seconds_waited, largest
            ),
            most_ahead=stream.capacity // largest + 1,
        )

    def _routers(self) -> dict[int, torch.Tensor]:
        routers = {layer: self._layers[layer].router for layer in self.popularity.layers}
        return {layer: router for layer, router in routers.items() if router is not None}

    def _held(self, key: ExpertKey) -> torch.Tensor:
        return self._memory.shard(ShardKey(*key))

    def _bind(self, key: ExpertKey, view: torch.Tensor) -> ExpertWeights:
        return self._layers[key.layer].bind_expert(key.expert, view)

    def _shard(self, key: ExpertKey) -> Shard:
        return self._lanes.shard(ShardKey(*key))

    def _move_out(self, leaving: ExpertKey, entering: ExpertKey, slot: torch.Tensor) -> None:
        self._memory.move_out(ShardKey(*leaving), ShardKey(*entering), slot)
