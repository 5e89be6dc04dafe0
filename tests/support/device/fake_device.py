"""A device of CPU tensors: the whole engine runs on it, its copies move when a seed lets them.

Tensors "on the device" are CPU tensors of another type that say they are on CUDA. What CUDA refuses is refused: an
operation on tensors of both sides, numpy of a device tensor, a copy in either direction, by any stream, over the border
of a registration, more page-locked memory than there may be. Memory is poisoned when it is allocated and when a copy
into it begins; what is copied to the host arrives when the stream is waited for, and not before. Copies by side streams
are the simulator's (support/stream): they run in steps, as late or early as events allow. Compute is eager, so
what it waits for happens at once; that it lags behind the host is shown by looking again: every read of memory that
copies write to, and of page-locked memory that is copied from, is checked once more when the compute stream, which a
seed drives too, has come to it. Triton's kernels run in its interpreter, on a device of a capability that they are for;
what they read through addresses alone is looked at again, too. The card's memory is fake_card.py's business.
"""

import ctypes
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map_only

from moedge.offload.device import Device
from moedge.quant.kernels.operands import STEP_NBYTES
from moedge.quant.kernels.upload import _rings
from support.device import fake_card as card
from support.device.fake_graph import Graph
from support.stream import simulator

POISON = 0xFF


class OnDevice(torch.Tensor):
    """A tensor whose bytes count as the device's."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


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
        larger: int = 1,
    ) -> None:
        super().__init__()
        self.machine = card.Machine(seed)
        self.cuda = card.Cuda(self.machine, total, context, pin_limit, card.Properties(*capability), larger)
        self.torch_device = torch.device("cuda", 0)
        self.device = Device(self.torch_device, self.cuda, self.cuda.clear_error)
        self.nbytes_copied = 0
        self.num_looks = 0
        self.launched: Counter[str] = Counter()
        self._streamed_into: dict[int, int] = {}
        self._live: set[int] = set()
        self.recording: Graph | None = None
        self.cuda.CUDAGraph = lambda: Graph(self)
        self.cuda.graph_pool_handle = list

    def __enter__(self) -> "FakeDevice":
        if self.cuda.properties[:2] >= (7, 5):
            from triton.runtime.interpreter import GridExecutor

            self._interpret = GridExecutor.__call__
            GridExecutor.__call__ = lambda grid, *arguments, **options: self._launch(grid, arguments, options)
        # Its card is its own: so are what is page-locked for it, and its streams.
        _rings.clear()
        self._torch_cuda = {name: getattr(torch.cuda, name) for name in _OF_TORCH_CUDA}
        for name in _OF_TORCH_CUDA:
            setattr(torch.cuda, name, getattr(self.cuda, name))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _rings.clear()
        for name, real in self._torch_cuda.items():
            setattr(torch.cuda, name, real)
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
        if name in {"pin_memory", "is_pinned"}:
            return getattr(self, f"_{name}")(args[0])
        if name in {"to", "cpu", "cuda"}:
            return self._to(func, name, args, kwargs)
        if name == "copy_":
            return self._copy(func, *args, **kwargs)
        if name == "numpy" and isinstance(args[0], OnDevice):
            raise TypeError("a device tensor has no numpy; copy it to the host first")
        return self._operate(func, name, args, kwargs)

    def _operate(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = _tensors_in(args) + _tensors_in(kwargs)
        on_device = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
        if on_device and name != "__get__":
            _refuse_mixture(name, tensors)
        asked, pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
        if self._is_here(asked):
            kwargs["device"] = "cpu"
        if on_device or self._is_here(asked):
            self._load_library(name, on_device)
        result = func(*args, **kwargs)
        if pinned:
            return self._pinned(result)
        if self.recording is not None and on_device and name not in _NO_LAUNCH:
            self._record(func, name, args, kwargs, result)
        if on_device and self._streamed_into and name not in _NO_LAUNCH:
            self._look_again(on_device, result)
        if self._is_here(asked) or (on_device and asked is None):
            result = self._mark(result, fresh=name in _UNWRITTEN)
            # Room for what a kernel writes is found before it is launched.
            self._tell_stale_error(name)
        return result

    def _record(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        assert self.recording is not None
        if _tensors_in(result):
            self.recording.record(func, args, kwargs, result)
        elif name in _READS:
            raise RuntimeError("operation not permitted when stream is capturing")

    def _to(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source, asked = args[0], {"cpu": "cpu", "cuda": self.torch_device}.get(name, kwargs.get("device"))
        for value in args[1:]:
            if isinstance(value, torch.Tensor):
                asked = self.torch_device if isinstance(value, OnDevice) else "cpu"
            elif isinstance(value, torch.device) or (isinstance(value, str) and value != ""):
                asked = value
        was_here = isinstance(source, OnDevice)
        if self.recording is not None and was_here != (was_here if asked is None else self._is_here(asked)):
            raise RuntimeError("operation not permitted when stream is capturing")
        goes_here = was_here if asked is None else self._is_here(asked)
        plain = tuple("cpu" if self._is_device(value) else value for value in args[1:])
        options = {key: "cpu" if key == "device" else value for key, value in kwargs.items()}
        if goes_here and not was_here:
            self._before_reading(source)
        result = source.as_subclass(torch.Tensor) if name != "to" else func(_plain(source), *plain, **options)
        if goes_here == was_here and result.data_ptr() == source.data_ptr():
            return source
        if goes_here != was_here and result.data_ptr() == source.data_ptr():
            result = result.clone()
        if goes_here == was_here:
            if goes_here and self.recording is not None:
                self.recording.record(func, (_plain(source), *plain), options, result)
            return self._mark(result) if goes_here else result
        non_blocking = bool(kwargs.get("non_blocking", False))
        if goes_here:
            self._sent(source, non_blocking)
            return self._mark(result)
        self._look_again([source], None)
        self._fetched(result, non_blocking)
        return result

    def _copy(self, func: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        here, there = isinstance(source, OnDevice), isinstance(target, OnDevice)
        if self.recording is not None:
            if not (here and there):
                raise RuntimeError("operation not permitted when stream is capturing")
            self.recording.record(func, (_plain(target), _plain(source)), {}, target)
            return target
        if self.cuda.current_stream() is not self.machine.compute:
            return self._copy_aside(target, source, non_blocking)
        if there and not here:
            self._before_reading(source)
        func(target, source, non_blocking=non_blocking)
        if here:
            self._look_again([source], target if there else None)
        if there and not here:
            self._sent(source, non_blocking)
        if here and not there:
            self._fetched(target, non_blocking)
        return target

    def _before_reading(self, source: torch.Tensor) -> None:
        """What the compute stream reads of the host comes after what it was asked to write there."""
        begin, end = _bytes_of(source)
        self.machine.run_until(lambda: not self.cuda.is_on_the_way(begin, end))

    def _sent(self, source: torch.Tensor, non_blocking: bool) -> None:
        """A copy to the device: what is page-locked is read when the stream comes to it, the rest before the return."""
        begin, end = _bytes_of(source)
        pinned, stream = self.cuda.is_pinned(begin, end), self.cuda.current_stream()
        if not non_blocking:
            self._synchronize(stream)
        elif pinned and begin < end:
            view, seen = source, _checksum(source)

            def look() -> None:
                if _checksum(view) != seen:
                    raise simulator.Race("host memory was overwritten before the device had copied it")

            stream.steps.append(look)
            self.cuda.under_way(begin, end, stream)

    def _fetched(self, target: torch.Tensor, non_blocking: bool) -> None:
        """A copy to the host, which was done at once: unless it was waited for, nothing of it is there yet."""
        begin, end = _bytes_of(target)
        self.cuda.is_pinned(begin, end)
        if not non_blocking:
            self._synchronize(self.machine.compute)
        elif begin < end:
            content = target.clone()
            ctypes.memset(begin, POISON, end - begin) if target.is_contiguous() else target.fill_(-1)
            self.machine.compute.steps.append(lambda: target.copy_(content))
            self.cuda.under_way(begin, end, self.machine.compute)

    def _synchronize(self, stream: Any) -> None:
        event = self.cuda.Event()
        event.record(stream)
        event.synchronize()

    def _copy_aside(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """By a side stream, which computes nothing."""
        stream = self.cuda.current_stream()
        assert isinstance(target, OnDevice)
        begin, end = _bytes_of(source)
        if not self.cuda.is_pinned(begin, end) and non_blocking:
            raise RuntimeError("the source of a copy that nobody waits for is not page-locked")
        self.machine.wander()
        storage = target.untyped_storage()
        self._streamed_into[storage.data_ptr()] = storage.nbytes()
        into, out_of = _plain(target), _plain(source)
        half = len(into) // 2

        def finish() -> None:
            into[half:].copy_(out_of[half:])
            self.nbytes_copied += len(into)

        stream.steps += [lambda: into.fill_(POISON), lambda: into[:half].copy_(out_of[:half]), finish]
        self.cuda.under_way(begin, end, stream)
        if not non_blocking:
            self._synchronize(stream)
        return target

    def _tell_stale_error(self, name: str) -> None:
        """An error that was left behind is the next launch's."""
        if self.cuda.stale_error and name not in _UNWRITTEN | _NO_LAUNCH:
            self.cuda.stale_error = False
            raise RuntimeError(f"CUDA error: out of memory (of an earlier call, told to {name})")

    def _load_library(self, name: str, on_device: list[Any]) -> None:
        """Before the first launch of its kind."""
        with torch._C.DisableTorchFunction():
            if name in _PRODUCTS:
                self.cuda.use("cublas")
                self.cuda.use("product", on_device[0].dtype)
            elif name == "scaled_dot_product_attention":
                self.cuda.use("attention", on_device[0].dtype)

    def _pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._is_pinned(tensor) else self._pinned(tensor.clone())

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, OnDevice) and bool(self.cuda.is_pinned(*_bytes_of(tensor)))

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if nbytes:
            self.cuda.pin_block(address, nbytes)
            weakref.finalize(storage, self.cuda.free_block, address)
        return tensor

    def _launch(self, grid: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A kernel: all its tensors are on the device; what it may read of streamed memory is looked at again."""
        tensors = _tensors_in(arguments)
        _refuse_mixture(grid.fn.__name__, tensors)
        self.launched[grid.fn.__name__] += 1
        self.cuda.use("triton", grid.fn.__name__)
        if self.recording is not None:
            with torch._C.DisableTorchFunction():
                self.recording.record_launch(self._interpret, grid, arguments, options)
            return
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
        written = {leaf.untyped_storage().data_ptr() for leaf in _tensors_in(result)}
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

        if isinstance(result, torch.Tensor):
            return mark(result)
        # Most results are one tensor, or a size: looking for tensors is quicker than making a tree anew.
        return tree_map_only(torch.Tensor, mark, result) if _tensors_in(result) else result

    def _count(self, tensor: torch.Tensor, fresh: bool) -> None:
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if address in self._live or not nbytes:
            return
        if fresh:
            storage.fill_(POISON)
        block = self.cuda.take(nbytes)
        self._live.add(address)
        weakref.finalize(storage, self._forget, address, block)

    def _forget(self, address: int, block: Any) -> None:
        self._live.discard(address)
        self._streamed_into.pop(address, None)
        self.cuda.give(block)

    def _is_device(self, value: Any) -> bool:
        return isinstance(value, torch.device) or (isinstance(value, str) and value.split(":")[0] in {"cpu", "cuda"})

    def _is_here(self, value: Any) -> bool:
        return self._is_device(value) and torch.device(value).type == self.torch_device.type


_OF_TORCH_CUDA = (
    "Event", "Stream", "stream", "set_stream", "current_stream", "synchronize", "CUDAGraph", "graph_pool_handle",
)  # fmt: skip
_READS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "equal"}
_NO_LAUNCH = {"__get__", "__getitem__", "view", "flatten", "narrow", "data_ptr", "untyped_storage", "is_contiguous"}
_NO_LAUNCH |= {
    "numel",
    "size",
    "stride",
    "element_size",
    "storage_offset",
    "transpose",
    "unsqueeze",
    "expand",
    "__len__",
    "dim",
}
_PRODUCTS = {"mm", "bmm", "matmul", "__matmul__", "__rmatmul__", "linear", "addmm", "baddbmm", "mv", "einsum"}
_UNWRITTEN = {"empty", "new_empty", "empty_like", "empty_strided"}
_ANSWERS: dict[Any, Callable[[FakeDevice], Any]] = {
    torch.Tensor.device.__get__: lambda fake: fake.torch_device,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: lambda fake: True,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda fake: False,  # type: ignore[attr-defined]
}


def _refuse_mixture(name: str, tensors: list[torch.Tensor]) -> None:
    """As CUDA does: only numbers may come from the host."""
    strangers = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim()]
    if strangers:
        raise RuntimeError(f"{name}: expected all tensors on one device, {list(strangers[0].shape)} is in the host")


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """As torch's tree_iter finds them in tuples, lists and dicts, at a tenth of its time."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for each in value for tensor in _tensors_in(each)]


def _is_stack(leaf: Any) -> bool:
    return type(leaf).__name__ == "Stack"


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(_plain(tensor).contiguous().view(-1).view(torch.uint8).numpy().data)


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses from the first byte that a tensor has to behind its last one."""
    if not tensor.numel():
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()
