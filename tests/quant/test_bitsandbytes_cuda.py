"""bitsandbytes' own CUDA function for nf4, called as we call it (`quant/formats/bitsandbytes_kernels.py`), with a
recorder where its native library would be.

No GPU is needed: the function is Python that checks its arguments and hands addresses to a C function. It is registered
for CPU tensors here, so that the call goes through torch's dispatcher, which turns a `torch.Size` into a list.
"""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module, util
from typing import Any

import pytest
import torch

from moedge.quant.formats import bitsandbytes_kernels

BLOCK = 64
OPERATOR = "dequantize_4bit.out"
STREAM = 77


class Library:
    """In place of the native library: `calls` are the names and arguments of what was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Any]]] = []

    def __getattr__(self, name: str) -> "CFunction":
        function = CFunction(name, self.calls)
        setattr(self, name, function)
        return function


class CFunction:
    """As of ctypes: where argument types are declared, arguments must convert to them."""

    argtypes: list[Any] | None = None
    restype: Any = None

    def __init__(self, name: str, calls: list[tuple[str, list[Any]]]) -> None:
        self.name, self.calls = name, calls

    def __call__(self, *arguments: Any) -> None:
        if self.argtypes is not None:
            for kind, argument in zip(self.argtypes, arguments, strict=True):
                kind.from_param(argument)
        self.calls.append((self.name, [getattr(argument, "value", argument) for argument in arguments]))


class NotOnCpu(torch.Tensor):
    """A tensor of the host that our code takes for one on a GPU."""

    is_cpu = False  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """While it is there, the operator on CPU tensors is bitsandbytes' function for CUDA, over this library."""
    bitsandbytes_kernels.load()
    recorder = Library()
    function = cuda_functions(recorder, monkeypatch)[f"bitsandbytes::{OPERATOR}"]
    with torch.library._scoped_library("bitsandbytes", "IMPL") as operators:
        operators.impl(OPERATOR, function, "CPU")
        yield recorder


def cuda_functions(recorder: Library, monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    """What bitsandbytes registers for CUDA, by operator: of a second copy of the module, which registers nothing."""
    functions: dict[str, Callable[..., Any]] = {}

    def register_kernel(operator: str, device_type: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        assert device_type == "cuda"
        return lambda function: functions.setdefault(operator, function)

    monkeypatch.setattr(import_module("bitsandbytes._ops"), "register_kernel", register_kernel)
    monkeypatch.setattr(import_module("bitsandbytes.cextension"), "lib", recorder)
    # A torch that was built without CUDA has no such function.
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    found = util.find_spec("bitsandbytes.backends.cuda.ops")
    assert found is not None
    assert found.origin is not None
    spec = util.spec_from_file_location("bitsandbytes.backends.cuda.second_ops", found.origin)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return functions


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16")]
)
def test_the_cuda_function_takes_our_call(library: Library, dtype: torch.dtype, name: str) -> None:
    """A strip of 48 rows out of the middle of a matrix, into the beginning of a scratch."""
    codes, absmax, scratch = (
        torch.empty(96, 64, dtype=torch.uint8),
        torch.empty(48, 2),
        torch.empty(64, 128, dtype=dtype),
    )
    strip, out = codes[16:64].as_subclass(NotOnCpu), scratch[:48].as_subclass(NotOnCpu)
    bitsandbytes_kernels.dequantize_nf4(strip, absmax.as_subclass(NotOnCpu), BLOCK, out)
    # Their order is the C function's: no table of levels, codes, absmax, out, block, numbers, stream.
    addresses = [codes.data_ptr() + 16 * 64, absmax.data_ptr(), scratch.data_ptr()]
    assert library.calls == [(f"cdequantize_blockwise_{name}_nf4", [None, *addresses, 64, 48 * 128, STREAM])]


def test_the_cuda_function_refuses_another_shape(library: Library) -> None:
    """Negative control: what it checks, it checks here too; nothing reaches the library."""
    codes, out = torch.empty(4, 32, dtype=torch.uint8), torch.empty(4, 64)
    with pytest.raises((RuntimeError, ValueError), match=r"out\.shape"):
        torch.ops.bitsandbytes.dequantize_4bit.out(
            codes, torch.empty(4), BLOCK, "nf4", torch.Size([8, 32]), out.dtype, out=out
        )
    assert library.calls == []
