"""A device of CPU tensors: the whole engine runs on it, its copies move when a seed lets them.

Tensors "on the device" are CPU tensors of another type that say they are on CUDA. What CUDA refuses is refused: an
operation on tensors of both sides, numpy of a device tensor, one copy out of two registrations. Memory is poisoned when
it is allocated and when a copy into it begins. Copies by side streams are the simulator's (tests/offload/stream): they
run in steps, as late or as early as events allow. Compute is eager, so what it waits for happens at once; that it
lags behind the host is shown by looking again: every read of memory that copies write to is checked once more when
the compute stream, which a seed drives too, has come to it. Triton's kernels run in its interpreter, on a device of a
capability that they are for; what they read through addresses alone is looked at again, too.
"""

import ctypes
import sys
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map_only

from moedge.offload.device import Device
from moedge.quant.kernels.operands import STEP_NBYTES

POISON = 0xFF


def _load_simulator() -> ModuleType:
    if "simulator" not in sys.modules:
        path = Path(__file__).parents[1] / "offload" / "stream" / "simulator.py"
        spec = util.spec_from_file_location("simulator", path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["simulator"] = util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["simulator"])
    return sys.modules["simulator"]


simulator = _load_simulator()


class OnDevice(torch.Tensor):
    """A tensor whose bytes count as the device's."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class Machine(simulator.Machine):  # type: ignore[misc,name-defined]
    """The simulator's, for several threads: readers that wait for a copy let the machine run on."""

    def __init__(self, seed: int) -> None:
        self.lock = threading.RLock()
        super().__init__(seed)
        self.actors.remove(self.compute)
        self.compute = Compute(self)

    def wander(self) -> None:
        with self.lock:
            super().wander()

    def advance(self) -> bool:
        # What the machine does is nobody's operation.
        with torch._C.DisableTorchFunction():
            return bool(super().advance())

    def run_until(self, reached: Callable[[], bool]) -> None:
        with self.lock:
            super().run_until(reached)


class Compute(simulator.Stream):  # type: ignore[misc,name-defined]
    """The stream that compute is on; its queue holds what is still to be looked at again."""

    def wait_event(self, event: Any) -> None:
        self.machine.wander()
        completion = event.latest
        if completion is not None:
            self.machine.run_until(lambda: completion.done)


class Properties(NamedTuple):
    """Of a device, as torch names them."""

    major: int
    minor: int
    multi_processor_count: int = 4


class Cuda(simulator.Cuda):  # type: ignore[misc,name-defined]
    """What the code under test takes for `torch.cuda`."""

    def __init__(self, machine: Machine, total: int, context: int, pin_limit: float, properties: Properties) -> None:
        super().__init__(machine, pin_limit)
        self.total, self.context = total, context
        self.properties = properties
        self.reserved = self.most_reserved = 0
        self.limit = total

    def cudart(self) -> "Cuda":
        return self

    def get_device_properties(self, place: torch.device) -> Properties:
        return self.properties

    def mem_get_info(self) -> tuple[int, int]:
        return self.total - self.context - self.reserved, self.total

    def memory_reserved(self) -> int:
        return self.reserved

    def max_memory_reserved(self) -> int:
        return self.most_reserved

    def empty_cache(self) -> None:
        pass

    def reset_peak_memory_stats(self) -> None:
        self.most_reserved = self.reserved

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        self.limit = int(fraction * self.total)

    def take(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.most_reserved = max(self.most_reserved, self.reserved)
        if self.reserved > self.limit:
            raise torch.OutOfMemoryError(f"{self.reserved} bytes of a fake device that may give {self.limit}")

    def give(self, nbytes: int) -> None:
        self.reserved -= nbytes


class FakeDevice(TorchFunctionMode):
    """Inside `with FakeDevice(...) as fake`, `fake.device` computes; `nbytes_copied` is what crossed its link.

    Its capability is one that no Triton compiles for, unless kernels are wanted: the interpreter takes its time.
    """

    def __init__(
        self,
        seed: int = 0,
        total: int = 64 << 30,
        context: int = 10 << 20,
        pin_limit: float = float("inf"),
        capability: tuple[int, int] = (7, 0),
    ) -> None:
        super().__init__()
        self.machine = Machine(seed)
        self.cuda = Cuda(self.machine, total, context, pin_limit, Properties(*capability))
        self.place = torch.device("cuda", 0)
        self.device = Device(self.place, self.cuda, self.cuda.clear_error)
        self.nbytes_copied = 0
        self.num_looks = 0
        self.launched: Counter[str] = Counter()
        self._streamed_into: dict[int, int] = {}
        self._live: set[int] = set()

    def __enter__(self) -> "FakeDevice":
        if self.cuda.properties[:2] >= (7, 5):
            from triton.runtime.interpreter import GridExecutor

            self._interpret = GridExecutor.__call__
            GridExecutor.__call__ = lambda grid, *arguments, **options: self._launch(grid, arguments, options)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.cuda.properties[:2] >= (7, 5):
            from triton.runtime.interpreter import GridExecutor

            GridExecutor.__call__ = self._interpret

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _ANSWERS:
            return _ANSWERS[func](self) if isinstance(args[0], OnDevice) else func(*args)
        name = getattr(func, "__name__", "")
        if name == "pin_memory":
            return args[0]
        if name in {"to", "cpu", "cuda"}:
            return self._to(func, name, args, kwargs)
        if name == "copy_":
            return self._copy(func, *args, **kwargs)
        if name == "numpy" and isinstance(args[0], OnDevice):
            raise TypeError("a device tensor has no numpy; copy it to the host first")
        return self._operate(func, name, args, kwargs)

    def _operate(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
        if on_device and name != "__get__":
            _refuse_mixture(name, tensors)
        asked = kwargs.get("device")
        if self._is_here(asked):
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if on_device:
            self._look_again(on_device, result)
        if self._is_here(asked) or (on_device and asked is None):
            return self._mark(result, fresh=name in _UNWRITTEN)
        return result

    def _to(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source, asked = args[0], {"cpu": "cpu", "cuda": self.place}.get(name, kwargs.get("device"))
        for value in args[1:]:
            if isinstance(value, torch.Tensor):
                asked = self.place if isinstance(value, OnDevice) else "cpu"
            elif isinstance(value, torch.device) or (isinstance(value, str) and value != ""):
                asked = value
        was_here = isinstance(source, OnDevice)
        goes_here = was_here if asked is None else self._is_here(asked)
        plain = tuple("cpu" if self._is_device(value) else value for value in args[1:])
        options = {key: "cpu" if key == "device" else value for key, value in kwargs.items()}
        result = source.as_subclass(torch.Tensor) if name != "to" else func(_plain(source), *plain, **options)
        if goes_here == was_here and result.data_ptr() == source.data_ptr():
            return source
        if goes_here != was_here and result.data_ptr() == source.data_ptr():
            result = result.clone()
        return self._mark(result) if goes_here else result

    def _copy(self, func: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        stream = self.cuda.current_stream()
        if stream is self.machine.compute:
            func(target, source, non_blocking=non_blocking)
            if isinstance(source, OnDevice):
                self._look_again([source], target)
            return target
        assert isinstance(target, OnDevice)
        assert non_blocking
        self._refuse_two_registrations(source)
        self.machine.wander()
        storage = target.untyped_storage()
        self._streamed_into[storage.data_ptr()] = storage.nbytes()
        into, out_of = _plain(target), _plain(source)
        half = len(into) // 2

        def finish() -> None:
            into[half:].copy_(out_of[half:])
            self.nbytes_copied += len(into)

        stream.steps += [lambda: into.fill_(POISON), lambda: into[:half].copy_(out_of[:half]), finish]
        return target

    def _launch(self, grid: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A kernel: all its tensors are on the device; what it may read of streamed memory is looked at again."""
        tensors = [leaf for leaf in tree_iter(arguments) if isinstance(leaf, torch.Tensor)]
        _refuse_mixture(grid.fn.__name__, tensors)
        self.launched[grid.fn.__name__] += 1
        with torch._C.DisableTorchFunction():
            self._interpret(grid, *arguments, **options)
        self._look_again([tensor for tensor in tensors if isinstance(tensor, OnDevice)], None)
        for stack in (leaf for leaf in tree_iter(arguments, is_leaf=_is_stack) if _is_stack(leaf)):
            nbytes = stack.base.numel() * stack.base.element_size()
            for shift in _plain(stack.shifts).tolist():
                self._look_at(stack.base.data_ptr() + shift * STEP_NBYTES, nbytes)

    def _look_at(self, address: int, nbytes: int) -> None:
        if not self._is_streamed_into(address):
            return
        self.num_looks += 1
        seen = zlib.crc32(ctypes.string_at(address, nbytes))

        def look() -> None:
            if self._is_streamed_into(address) and zlib.crc32(ctypes.string_at(address, nbytes)) != seen:
                raise simulator.Race("weights were overwritten before a kernel had read them")

        self.machine.compute.steps.append(look)

    def _is_streamed_into(self, address: int) -> bool:
        return any(begin <= address < begin + nbytes for begin, nbytes in self._streamed_into.items())

    def _look_again(self, tensors: Iterable[torch.Tensor], result: Any) -> None:
        """What compute read of streamed memory must still be there when the device, lagging behind, reads it."""
        written = {leaf.untyped_storage().data_ptr() for leaf in tree_iter(result) if isinstance(leaf, torch.Tensor)}
        for tensor in tensors:
            storage = tensor.untyped_storage().data_ptr()
            if storage not in self._streamed_into or storage in written or not tensor.numel():
                continue
            view, seen = _plain(tensor), _checksum(tensor)
            self.num_looks += 1

            def look(view: torch.Tensor = view, seen: int = seen) -> None:
                if _checksum(view) != seen:
                    raise simulator.Race("weights were overwritten before compute had read them")

            self.machine.compute.steps.append(look)

    def _mark(self, result: Any, fresh: bool = False) -> Any:
        def mark(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, OnDevice):
                return tensor
            self._count(tensor, fresh)
            return tensor.as_subclass(OnDevice)

        return tree_map_only(torch.Tensor, mark, result)

    def _count(self, tensor: torch.Tensor, fresh: bool) -> None:
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if address in self._live or not nbytes:
            return
        if fresh:
            storage.fill_(POISON)
        self._live.add(address)
        self.cuda.take(nbytes)
        weakref.finalize(storage, self._forget, address, nbytes)

    def _forget(self, address: int, nbytes: int) -> None:
        self._live.discard(address)
        self._streamed_into.pop(address, None)
        self.cuda.give(nbytes)

    def _refuse_two_registrations(self, source: torch.Tensor) -> None:
        begin = source.data_ptr()
        end = begin + source.numel() * source.element_size()
        for at, nbytes in self.cuda.registered.items():
            if at < end and begin < at + nbytes and not at <= begin < end <= at + nbytes:
                raise RuntimeError("CUDA error: invalid argument (one copy reads from two registrations)")

    def _is_device(self, value: Any) -> bool:
        return isinstance(value, torch.device) or (isinstance(value, str) and value.split(":")[0] in {"cpu", "cuda"})

    def _is_here(self, value: Any) -> bool:
        return self._is_device(value) and torch.device(value).type == self.place.type


_UNWRITTEN = {"empty", "new_empty", "empty_like", "empty_strided"}
_ANSWERS: dict[Any, Callable[[FakeDevice], Any]] = {
    torch.Tensor.device.__get__: lambda fake: fake.place,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: lambda fake: True,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda fake: False,  # type: ignore[attr-defined]
}


def _refuse_mixture(name: str, tensors: list[torch.Tensor]) -> None:
    """As CUDA does: only numbers may come from the host."""
    strangers = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim()]
    if strangers:
        raise RuntimeError(f"{name}: expected all tensors on one device, {list(strangers[0].shape)} is in the host")


def _is_stack(leaf: Any) -> bool:
    return type(leaf).__name__ == "Stack"


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(_plain(tensor).contiguous().view(-1).view(torch.uint8).numpy().data)
