"""What ended jobs on a GPU that the processor never shows: copies over borders, pins that run out, memory elsewhere
(`offload/device.py`, `quant/kernels/upload.py`, `runtime/loading/machine_memory.py`).
"""

import sys
import threading
from contextlib import closing, nullcontext, suppress
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from moedge.moe.streaming_mode import Mode
from moedge.offload import device as slab
from moedge.offload import errors as cuda_error
from moedge.offload.device import HostMemory
from moedge.offload.machine.hardware import Hardware
from moedge.offload.machine.profile import Machine, PinLimit
from moedge.offload.stream.cuda_lane import CudaLane
from moedge.quant.kernels import upload as uploads
from moedge.quant.kernels.upload import RING_NBYTES, UploadRing, open_ring, upload
from moedge.runtime.kv.cache import ParkingMemory
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.loading import machine_memory as tiers
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.settings.settings import LIBRARIES_NBYTES, Budgets
from moedge.runtime.shape.model_shape import KVGroup
from moedge.runtime.weights import streaming as lanes

MIB = 1 << 20
PAGE = 4096


def engine(case: Any, fake: Any) -> Any:
    """One that stages what it can in host memory."""
    return closing(load_engine(case.source, case.plan(fake.device, 0.0), None, fake.device))


@pytest.mark.sample("pinned in part")
@pytest.mark.parametrize("limit", [float("inf"), RING_NBYTES + (1 << 19)], ids=["all pinned", "pinned in part"])
def test_swaps_never_cross_the_border_of_a_registration(
    limit: float, case: Any, fakes: ModuleType, modes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registrations of some one and a half experts: every second expert would lie over a border."""
    tiny = case("qwen3_moe")
    nbytes = max(shard.nbytes for shard in [layer.expert for layer in shards_of(tiny)] if shard)
    monkeypatch.setattr(slab, "PIN_CHUNK_NBYTES", nbytes * 3 // 2)
    monkeypatch.setattr(slab, "MIN_PIN_NBYTES", nbytes // 4)
    with fakes.FakeDevice(3, pin_limit=limit) as fake:
        plan = tiny.held(fake.device, 0.5, on_disk=False)
        with modes.restless():
            ran = tiny.run(plan, fake.device, stream=Mode.WANTED)
    assert ran.experts.swaps > 0
    assert ran.tokens == tiny.run(tiny.plan(None)).tokens


def shards_of(tiny: Any) -> Any:
    from moedge.runtime.shape.shards import model_shards

    return model_shards(tiny.source.shape, tiny.settings.quant, "fp32").layers


def test_no_more_is_page_locked_than_the_machine_s_limit_allows(case: Any, fakes: ModuleType) -> None:
    """The machine would give more; slab, rings and the ring for uploads share four fifths of what was measured."""
    tiny, fake = case("mixtral"), fakes.FakeDevice()
    found = Machine(Hardware("", 1, 1, (), ""), 1.0, pin=PinLimit(RING_NBYTES * 5 // 4 + 5 * MIB // 4, True))
    tiers.limit_pins(fake.device, found)
    with fake, engine(tiny, fake):
        assert 0 < fake.cuda.nbytes_pinned <= found.pin.usable
        assert fake.device.pins.taken == fake.cuda.nbytes_pinned
    with fakes.FakeDevice() as free, engine(tiny, free):
        assert free.cuda.nbytes_pinned > found.pin.usable, "the limit was no limit"
    assert fake.device.pins.taken == RING_NBYTES


def test_the_ring_for_uploads_is_pinned_first_and_nothing_after_it(case: Any, fakes: ModuleType) -> None:
    with fakes.FakeDevice(pin_limit=RING_NBYTES) as fake, engine(case("mixtral"), fake):
        assert fake.cuda.nbytes_pinned == RING_NBYTES
        assert not fake.cuda.registered
        for size in range(1, 3000, 7):
            x = torch.arange(size)
            assert torch.equal(upload(x, fake.torch_device).cpu(), x)
        assert fake.cuda.nbytes_pinned == RING_NBYTES


@pytest.mark.parametrize("limit", [0, RING_NBYTES])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (RING_NBYTES // 8,)])
def test_uploads_need_no_memory_that_can_be_page_locked(limit: int, shape: tuple[int, ...], fakes: ModuleType) -> None:
    """Where there is a ring, what it has no room for goes another way."""
    with fakes.FakeDevice(pin_limit=limit) as fake:
        x = torch.randint(1 << 40, shape)
        assert torch.equal(upload(x, fake.torch_device).cpu(), x)
        table = torch.zeros(4, 6, dtype=torch.int32).T
        assert torch.equal(upload(table, fake.torch_device).cpu(), table)


class Careless(UploadRing):
    """Takes the next segment whether or not it was copied."""

    def _take_next_segment(self) -> None:
        self._segment = (self._segment + 1) % 4
        self._head = self._segment * self._nbytes


def fill(ring: UploadRing, fake: Any) -> None:
    sent = [(x, ring.upload(x, fake.torch_device)) for x in torch.arange(6400).view(-1, 16)]
    torch.cuda.synchronize()
    assert all(there is not None and torch.equal(there.cpu(), x) for x, there in sent)


def test_a_place_of_the_ring_is_used_again_when_it_was_copied(fakes: ModuleType) -> None:
    for seed in range(5):
        with fakes.FakeDevice(seed) as fake:
            fill(UploadRing(torch.empty(4 * PAGE, dtype=torch.uint8, pin_memory=True)), fake)
    with fakes.FakeDevice() as fake:
        fake.machine.haste = 0.0
        careless = Careless(torch.empty(4 * PAGE, dtype=torch.uint8, pin_memory=True))
        with pytest.raises(fakes.simulator.Race):
            fill(careless, fake)


@pytest.mark.parametrize("asks", [False, True], ids=["as it is", "one that asks how long copies took"])
def test_an_engine_ends_with_the_cause_though_events_have_no_times_any_more(
    asks: bool, case: Any, fakes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error of the device, `elapsed_time` raises one of its own."""
    tiny, close = case("mixtral"), CudaLane.close

    def broken(*arguments: Any) -> Any:
        monkeypatch.setattr(fakes.simulator.Event, "elapsed_time", Mock(side_effect=RuntimeError("no time")))
        raise RuntimeError("the cause")

    def asking(lane: CudaLane) -> None:
        close(lane)
        assert lane.seconds_busy >= 0

    def break_later() -> None:
        monkeypatch.setattr(CudaLane, "wait", broken)

    monkeypatch.setattr(CudaLane, "close", asking if asks else close)
    with fakes.FakeDevice() as fake:
        plan = tiny.held(fake.device, 0.5, on_disk=False)
        with pytest.raises(RuntimeError) as ended:
            tiny.run(plan, fake.device, loaded_now=break_later)
    assert str(ended.value) == ("no time" if asks else "the cause")


class Forgetful(UploadRing):
    """Believes that whatever was copied was copied by the stream of today."""

    _stream = property(lambda self: torch.cuda.current_stream(), lambda self, stream: None)  # type: ignore[assignment]


def alternate(ring: UploadRing, fake: Any) -> None:
    """Two streams, each for fewer uploads than a segment has room for."""
    streams = fake.machine.compute, torch.cuda.Stream()
    sent = []
    for index, x in enumerate(torch.arange(6400).view(-1, 16)):
        with torch.cuda.stream(streams[index // 7 % 2]):
            sent.append((x, ring.upload(x, fake.torch_device)))
    torch.cuda.synchronize()
    streams[1].synchronize()
    assert all(there is not None and torch.equal(there.cpu(), x) for x, there in sent)


def test_the_ring_for_uploads_serves_two_streams(fakes: ModuleType) -> None:
    for seed in range(5):
        with fakes.FakeDevice(seed) as fake:
            alternate(UploadRing(torch.empty(4 * PAGE, dtype=torch.uint8, pin_memory=True)), fake)
    with fakes.FakeDevice() as fake:
        fake.machine.haste = 0.0
        forgetful = Forgetful(torch.empty(4 * PAGE, dtype=torch.uint8, pin_memory=True))
        with pytest.raises(fakes.simulator.Race):
            alternate(forgetful, fake)


def together(ring: UploadRing, fake: Any, threads: int, uploads: int) -> list[Any]:
    """Several threads, each with its uploads, as of several models in one process; what went wrong."""
    begin, sent, wrong = threading.Barrier(threads), [], []

    def work(first: int) -> None:
        # Modes of torch are a thread's own.
        TorchFunctionMode.__enter__(fake)
        try:
            begin.wait()
            for x in torch.arange(first, first + 16 * uploads).view(-1, 16):
                sent.append((x, ring.upload(x, fake.torch_device)))
        except Exception as error:
            wrong.append(error)
        finally:
            TorchFunctionMode.__exit__(fake, None, None, None)

    running = [threading.Thread(target=work, args=(10_000 * number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    try:
        torch.cuda.synchronize()
    except Exception as error:
        wrong.append(error)
    return wrong + [x for x, there in sent if there is None or not torch.equal(there.cpu(), x)]


class Meeting(UploadRing):
    """Two threads that ask where the ring is free ask at once, unless one of them is kept out."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._meet = threading.Barrier(2)
        super().__init__(memory)
        # One thread alone waits so long, and never again.
        self._meet_s = 0.3

    _free, _meet_s = 0, 0.0

    @property
    def _head(self) -> int:
        found = self._free
        with suppress(threading.BrokenBarrierError):
            self._meet.wait(self._meet_s)
        return found

    @_head.setter
    def _head(self, value: int) -> None:
        self._free = value


def test_the_ring_for_uploads_serves_threads(fakes: ModuleType) -> None:
    """An engine has one thread that uploads, but a process may have several engines on a device."""
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for seed in range(4):
            with fakes.FakeDevice(seed) as fake:
                ring = UploadRing(torch.empty(4 * PAGE, dtype=torch.uint8, pin_memory=True))
                assert together(ring, fake, 4, 100) == []
    finally:
        sys.setswitchinterval(switch)


@pytest.mark.parametrize("locked", [True, False])
def test_two_threads_never_get_one_place_of_the_ring(locked: bool, fakes: ModuleType) -> None:
    """Both look where it is free before either has taken its place; the planted bug is a ring without its lock.

    Whether the bug changes bytes depends on which thread goes on first, so that it has several chances.
    """

    def wrong() -> bool:
        ring = Meeting(torch.empty(4 * PAGE, dtype=torch.uint8, pin_memory=True))
        ring._lock = ring._lock if locked else nullcontext()  # type: ignore[assignment]
        return together(ring, fake, 2, 1) != []

    with fakes.FakeDevice() as fake:
        fake.machine.haste = 0.0
        assert any(wrong() for _ in range(2 if locked else 30)) != locked


def test_threads_that_load_at_once_open_one_ring(fakes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes while the first one's memory is being page-locked."""
    opened: list[int] = []

    def slowly(*size: Any, **options: Any) -> torch.Tensor:
        if options.get("pin_memory") and late.ident is None:
            late.start()
            late.join(0.2)
        return empty(*size, **options)

    def open_too() -> None:
        TorchFunctionMode.__enter__(fake)
        opened.append(open_ring(fake.torch_device))
        TorchFunctionMode.__exit__(fake, None, None, None)

    empty, late = torch.empty, threading.Thread(target=open_too)
    with fakes.FakeDevice() as fake:
        monkeypatch.setattr(torch, "empty", slowly)
        opened.append(open_ring(fake.torch_device))
        late.join()
        assert sorted(opened) == [0, RING_NBYTES]
        assert fake.cuda.nbytes_pinned == RING_NBYTES


def test_what_libraries_take_is_counted_before_the_plan(fakes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card where they take five times as much as the allowance beyond what is seen."""
    with fakes.FakeDevice(larger=20) as fake:
        monkeypatch.setattr(tiers, "find_device", lambda: fake.device)
        budget, _ = tiers.open_memory(Budgets(gpu_mem="8GiB"))
        granted = budget.device
        assert granted is not None
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x = torch.ones(1, 1, 8, 8, dtype=dtype, device=fake.torch_device)
            functional.linear(x, x[0, 0])
            functional.scaled_dot_product_attention(x, x, x)
        assert fake.device.context_nbytes > 5 * LIBRARIES_NBYTES // 2
        assert granted.context_nbytes == fake.device.context_nbytes + LIBRARIES_NBYTES


def test_pins_are_given_back_where_a_ring_cannot_be_had(
    case: Any, fakes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ring was pinned when memory gives out for the other; loading anew may get its addresses."""
    tiny, pinned = case("qwen3_moe"), []

    def refuses_the_second(nbytes: int) -> HostMemory:
        pinned.append(len(fake.cuda.registered))
        if len(pinned) == 2:
            raise MemoryError("no memory for a ring")
        return HostMemory(nbytes)

    with fakes.FakeDevice() as fake:
        plan = tiny.held(fake.device, 0.2)
        monkeypatch.setattr(lanes, "HostMemory", refuses_the_second)
        with pytest.raises(MemoryError):
            load_engine(tiny.source, plan, tiny.store, fake.device)
    assert pinned == [0, 1]
    assert not fake.cuda.registered
    assert fake.device.pins.taken == RING_NBYTES


def test_a_second_registration_is_an_error_and_no_limit(fakes: ModuleType) -> None:
    fake, memory = fakes.FakeDevice(), HostMemory(10 * PAGE)
    first = memory.pin(fake.device)
    with pytest.raises(RuntimeError, match="registered with CUDA already"):
        memory.pin(fake.device)
    assert not fake.cuda.stale_error
    first.close()
    assert fake.device.pins.taken == 0
    memory.pin(fake.device).close()


def test_a_stale_error_is_swallowed_where_the_allocator_gives_nothing(
    fakes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_error, "_spare", [])
    with fakes.FakeDevice(pin_limit=0) as fake:
        cuda_error.prepare_to_swallow()
        # The rest of the segment that the spare element lies in.
        kept = [fake.device.allocate(MIB), fake.device.allocate(MIB - 512)]
        fake.device.limit(0)
        assert fake.cuda.cudaHostRegister(1 << 40, PAGE, 0) == 2
        cuda_error.swallow_cuda_error()
        assert not fake.cuda.stale_error
        kept[0].fill_(1)
        cuda_error._spare.clear()


def test_parking_waits_for_its_copies_before_it_is_unregistered(fakes: ModuleType) -> None:
    spec = KVSpec(KVGroup((0,), 2, 16, None), "fp32", 4)
    with fakes.FakeDevice() as fake:
        fake.machine.haste = 0.0
        parking = ParkingMemory([spec], (2,), fake.device)
        slot = parking.slots[0][1]
        slot.copy_(torch.full((spec.block_nbytes,), 5, dtype=torch.uint8, device=fake.torch_device), non_blocking=True)
        parking.close()
        assert not fake.cuda.registered
        assert slot.unique().tolist() == [5]


def test_a_ring_is_opened_once(fakes: ModuleType) -> None:
    with fakes.FakeDevice() as fake:
        assert (open_ring(fake.torch_device), open_ring(fake.torch_device)) == (RING_NBYTES, 0)
        assert fake.torch_device in uploads._rings
    assert not uploads._rings
