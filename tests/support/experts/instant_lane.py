"""A lane that copies an expert's number over at once, and a stream of such experts."""

from typing import Any

import torch

from moedge.moe.streaming_order import ExpertFetchQueue
from moedge.offload.stream.stream import ALIGNMENT, Ring, Run, Shard, ShardKey, ShardStream, SyncPoint


class Copied:
    def __init__(self, lane: "InstantLane") -> None:
        self._lane = lane

    def query(self) -> bool:
        return not self._lane.is_late


class InstantLane:
    """Its bytes are `number` of an expert. Nothing seems to have arrived while it `is_late`."""

    is_late = False

    most_together = 1
    nbytes_moved = 0
    seconds_waited = 0.0
    seconds_busy = 0.0

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.started: list[str] = []

    def start(self, run: Run, after: SyncPoint | None) -> Copied:
        ((shard, slot),) = run
        self.memory[slot.offset : slot.end] = shard.offset
        self.started.append(shard.name)
        return Copied(self)

    def wait(self, ready: Copied) -> None:
        pass

    def mark_used(self) -> None:
        return None

    def close(self) -> None:
        pass


def number(key: ShardKey) -> int:
    return 16 * key.layer + key.expert


def shard(key: ShardKey) -> Shard:
    return Shard(f"{key.layer}/{key.expert}", ALIGNMENT, number(key))


def open_stream(ring_experts: int) -> tuple[ShardStream[Any], InstantLane]:
    memory = torch.zeros(ring_experts * ALIGNMENT, dtype=torch.uint8)
    lane = InstantLane(memory)
    return ShardStream(lane, Ring(len(memory)), memory), lane


def opened(ring_experts: int) -> tuple[ExpertFetchQueue, InstantLane]:
    stream, lane = open_stream(ring_experts)
    return ExpertFetchQueue(stream, shard), lane
