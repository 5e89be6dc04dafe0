"""Weights of a store during passes: held shards read once, the others through rings, ahead of compute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from ...moe.held import HeldExperts
from ...moe.streamed import StreamedExperts
from ...offload.arena import Arena
from ...offload.store.shard_file import ShardPlace
from ...offload.store.store import LayerPlaces, Store
from ...offload.stream.lane import Shard
from ...offload.stream.reader_lane import ReaderLane
from ...offload.stream.ring import Ring
from ...offload.stream.source import DirectFile, Source
from ...offload.stream.stream import ShardStream
from ..model.assembly import LayerAssembly
from ..plan.placement import Placement
from ..shape.shards import ModelShards


class StreamedWeights:
    """Binds a store's shards to a model's layers; `arrivals` drives the layers of a pass. Close it when done."""

    def __init__(self, store: Store, shards: ModelShards, placement: Placement, layers: list[LayerAssembly]) -> None:
        self._store = store
        self._layers = layers
        self._placement = placement
        self.head_shard = self._hold(store.head) if store.head else None
        self._not_counted = 0
        self._streams: list[ShardStream[torch.Tensor]] = []
        self._lanes: list[ReaderLane] = []
        dense = [places.dense for places in store.layers[placement.held_dense :] if places.dense is not None]
        self._dense = self._open_stream(dense, placement.dense_ring)
        experts = [
            place
            for places, held in zip(store.layers, placement.held_experts, strict=True)
            for place in places.experts[held:]
        ]
        self._experts = self._open_stream(experts, placement.expert_ring)
        for index, (layer, places) in enumerate(zip(layers, store.layers, strict=True)):
            self._bind(index, layer, places)

    @property
    def nbytes_streamed(self) -> int:
        """Bytes that came from the disk during passes so far."""
        return sum(stream.nbytes_arrived for stream in self._streams) - self._not_counted

    @property
    def nbytes_moved(self) -> int:
        """Grows with every chunk that a reader brings, also of shards that are not whole yet."""
        return sum(lane.nbytes_moved for lane in self._lanes)

    def fail(self, cause: BaseException) -> None:
        """Whoever waits for bytes gets StreamBroken from `cause`."""
        for lane in self._lanes:
            lane.fail(cause)

    def start_counting(self) -> None:
        """Forgets the bytes of passes so far."""
        self._not_counted += self.nbytes_streamed

    def arrivals(self) -> Iterator[int]:
        """Layers of one pass, each usable until the next is asked for."""
        for index, layer in enumerate(self._layers):
            if self._dense is None or index < self._placement.held_dense:
                yield index
                continue
            arrival = self._dense.next()
            layer.bind_dense(arrival.view)
            yield index
            self._dense.done(arrival)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._store.close()

    def _bind(self, index: int, layer: LayerAssembly, places: LayerPlaces) -> None:
        if places.dense is not None and index < self._placement.held_dense:
            layer.bind_dense(self._hold(places.dense))
        if not places.experts:
            return
        num_held = self._placement.held_experts[index]
        arena = Arena(places.experts[0].nbytes, num_held)
        for expert in range(num_held):
            self._store.read_into(places.experts[expert], arena.slot(expert).numpy().data, check=True)
        held = {expert: layer.bind_expert(expert, arena.slot(expert)) for expert in range(num_held)}
        streamed = range(num_held, len(places.experts))
        if self._experts is None or not streamed:
            layer.set_experts(HeldExperts(list(held.values())))
        else:
            layer.set_experts(StreamedExperts(held, streamed, self._experts, layer.bind_expert))

    def _hold(self, place: ShardPlace) -> torch.Tensor:
        shard = Arena(place.nbytes, 1).slot(0)
        self._store.read_into(place, shard.numpy().data, check=True)
        return shard

    def _open_stream(self, places: list[ShardPlace], ring_nbytes: int) -> ShardStream[torch.Tensor] | None:
        if not places:
            return None
        memory = Arena(ring_nbytes, 1).slot(0)
        sources: dict[Path | None, Source] = {path: DirectFile(path) for path in {place.path for place in places}}
        lane = ReaderLane(sources, memory.numpy().data)
        stream = ShardStream(lane, Ring(ring_nbytes), memory, [_shard(place) for place in places])
        self._streams.append(stream)
        self._lanes.append(lane)
        return stream


def _shard(place: ShardPlace) -> Shard:
    name = f"{place.path.name} {place.tensor} {place.index}"
    return Shard(name, place.nbytes, place.offset, place.path, place.crc32)
