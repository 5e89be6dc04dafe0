"""Copies to the device are asked for in an order that CUDA keeps; on a GPU the bytes are compared.

That no order of the machine's own breaks them is test_stream.py's business, with the same simulator.
"""

from types import ModuleType
from typing import Any

import pytest
import torch

from moedge.offload.device import Pinned, address_of, allocate
from moedge.offload.errors import swallow_cuda_error
from moedge.offload.stream.cuda_lane import CudaLane
from moedge.offload.stream.stream import ALIGNMENT, Ring, Shard, ShardStream, Slot

MIB = 1 << 20


@pytest.fixture
def machine(simulator: ModuleType) -> Any:
    machine = simulator.Machine(0)
    machine.haste = 0.0  # nothing happens until it is waited for
    return machine


def lane_of(simulator: ModuleType, machine: Any, nbytes: int, pin_limit: float = float("inf")) -> tuple[Any, Any, Any]:
    cuda = simulator.Cuda(machine, pin_limit)
    host, memory = simulator.Memory(cuda, nbytes, None), simulator.Memory(cuda, nbytes)
    memory.cells = [None] * len(memory.cells)
    return CudaLane(cuda, host, Pinned(cuda, 1 << 40, nbytes, cuda.clear_error), memory), host, memory


def test_a_copy_does_not_block_and_is_there_after_the_wait(simulator: ModuleType, machine: Any) -> None:
    lane, host, memory = lane_of(simulator, machine, 8 * ALIGNMENT)
    ready = lane.start([(Shard("s", 2 * ALIGNMENT, 3 * ALIGNMENT), Slot(ALIGNMENT, 2 * ALIGNMENT))], None)
    assert set(memory.cells) == {None}
    assert not ready.query()
    lane.wait(ready)
    machine.compute.synchronize()
    assert memory.cells[1:3] == host.cells[3:5]
    assert memory.cells[0] is memory.cells[3] is None
    assert lane.nbytes_moved == 2 * ALIGNMENT
    assert lane.seconds_waited == 0.001, "the machine's events are a millisecond apart"


def test_every_use_has_an_event_of_its_own(simulator: ModuleType, machine: Any) -> None:
    lane, _, _ = lane_of(simulator, machine, 8 * ALIGNMENT)
    slot = Slot(0, ALIGNMENT)
    events = [lane.start([(Shard("s", ALIGNMENT, 0), slot)], None) for _ in range(3)]
    events += [lane.mark_used() for _ in range(3)]
    assert len({id(event) for event in events}) == 6


@pytest.mark.parametrize("limit_mib", [0, 300, float("inf")])
def test_a_copy_is_cut_where_registrations_meet(simulator: ModuleType, machine: Any, limit_mib: float) -> None:
    lane, host, memory = lane_of(simulator, machine, 600 * MIB, limit_mib * MIB)
    lane.copy([(200 * MIB, Slot(0, 400 * MIB))], None)
    lane.close()
    assert memory.cells[: 400 * MIB // ALIGNMENT] == host.cells[200 * MIB // ALIGNMENT :]


def test_close_waits_for_copies_and_for_compute(simulator: ModuleType, machine: Any) -> None:
    lane, host, memory = lane_of(simulator, machine, 4 * ALIGNMENT)
    lane.start([(Shard("s", 4 * ALIGNMENT, 0), Slot(0, 4 * ALIGNMENT))], None)
    computed: list[int] = []
    machine.compute.steps.append(lambda: computed.append(1))
    lane.close()
    assert memory.cells == host.cells
    assert computed == [1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_gets_the_bytes_of_every_shard() -> None:
    sizes = [ALIGNMENT * pages - index for index, pages in enumerate([700, 3, 1500, 90, 2, 400])]
    begins = [ALIGNMENT * sum(-(-size // ALIGNMENT) for size in sizes[:index]) for index in range(len(sizes))]
    slab = allocate(begins[-1] + sizes[-1])
    host = torch.frombuffer(slab, dtype=torch.uint8)
    host.random_()
    pinned = Pinned(torch.cuda.cudart(), address_of(slab), len(slab), swallow_cuda_error)
    assert pinned.nbytes == len(slab)
    ring = Ring(2000 * ALIGNMENT)
    memory = torch.empty(ring.capacity, dtype=torch.uint8, device="cuda")
    lane = CudaLane(torch.cuda, host, pinned, memory)
    shards = [Shard(str(index), sizes[index], begins[index]) for index in range(len(sizes))]
    stream = ShardStream(lane, ring, memory)
    stream.ask(*shards)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    wanted = host.cuda()
    for arrival in stream.cycle(50 * len(shards)):
        begin = arrival.shard.offset
        wrong += (arrival.view != wanted[begin : begin + arrival.shard.nbytes]).sum()
        arrival.view.fill_(0)
    stream.close()
    assert wrong.item() == 0
    assert stream.lane.nbytes_moved >= 50 * sum(sizes)
    pinned.close()
