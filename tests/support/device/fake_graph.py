"""CUDA graphs of a fake device: what is called while one is recorded counts when it is replayed, and only then.

Tensors that recording makes lie in the memory of the pool. As soon as nobody holds one any more, the graphs that are
recorded afterwards may use its memory: each poisons it when it is replayed.
"""

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

POISON = 0xFF


class Graph:
    """What the code under test takes for `torch.cuda.CUDAGraph`."""

    def __init__(self, fake: Any) -> None:
        self._fake = fake
        self._calls: list[Callable[[], None]] = []
        self._made: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        self._reused: list[torch.Tensor] = []
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.replayed = 0

    def capture_begin(self, pool: list["Graph"], capture_error_mode: str = "global") -> None:
        if self._fake.cuda.current_stream() is self._fake.machine.compute:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        if self._fake.recording is not None:
            raise RuntimeError("a graph is being recorded already")
        self._reused = [memory for graph in pool for held, memory in graph._made if held() is None]
        pool.append(self)
        self._fake.recording = self

    def capture_end(self) -> None:
        if self._fake.recording is not self:
            raise RuntimeError("this graph is not being recorded")
        self._fake.recording = None
        with torch._C.DisableTorchFunction():
            for memory, before in reversed(self._before):
                memory.copy_(before)
        self._before.clear()
        for _, memory in self._made:
            poison(memory)

    def replay(self) -> None:
        if self._fake.recording is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.replayed += 1
        with torch._C.DisableTorchFunction():
            for memory in self._reused:
                poison(memory)
            for call in self._calls:
                call()

    def record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Notes an operation that has been computed once, on whatever the memory held."""
        args, kwargs = alias(args), alias(kwargs)
        results = [result] if isinstance(result, torch.Tensor) else [each for each in result if torch.is_tensor(each)]
        memory = [alias(each) for each in results]
        given = {each.untyped_storage().data_ptr() for each in tensors_in((args, kwargs))}
        fresh = [each.untyped_storage().data_ptr() not in given for each in memory]
        self._made += [(weakref.ref(each), kept) for each, kept, new in zip(results, memory, fresh, strict=True) if new]

        def again() -> None:
            found = func(*args, **kwargs)
            for into, each, new in zip(memory, [found] if torch.is_tensor(found) else found, fresh, strict=True):
                if new:
                    into.copy_(each)

        self._calls.append(again)

    def record_launch(self, run: Callable[..., None], grid: Any, arguments: Any, options: Any) -> None:
        """Notes a kernel. It runs, since what follows looks at indices that it gives; what it changes of other memory
        is undone when the recording ends.
        """
        arguments = alias(arguments)
        mine = {memory.untyped_storage().data_ptr() for _, memory in self._made}
        others = [each for each in tensors_in(arguments) if each.untyped_storage().data_ptr() not in mine]
        self._before += [(each, each.clone()) for each in others]
        run(grid, *arguments, **options)
        self._calls.append(lambda: run(grid, *arguments, **options))


def alias(value: Any) -> Any:
    """The same memory without the tensors that hold it, so that these can end."""
    with torch._C.DisableTorchFunction():
        return tree_map_only(torch.Tensor, lambda each: torch.ops.aten.alias(each.as_subclass(torch.Tensor)), value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for each in value for tensor in tensors_in(each)]


def poison(memory: torch.Tensor) -> None:
    with torch._C.DisableTorchFunction():
        storage = memory.untyped_storage()
        ctypes.memset(storage.data_ptr(), POISON, storage.nbytes())
