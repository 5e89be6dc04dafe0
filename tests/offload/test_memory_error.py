"""Errors of memory are told from others, whoever raises them (`offload/errors.py`), and a job gives something up for
each (`runtime/engine/engine.py`, `runtime/loading/engine_loader.py`).
"""

import errno
import gc
import resource
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moedge.offload import memory
from moedge.offload.errors import is_out_of_memory
from moedge.runtime.engine.engine import SplitRetry
from moedge.runtime.loading.engine_loader import load_with_fallback

MEMORY = [
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("unable to mmap 4096 bytes from file <a>: Cannot allocate memory (12)"),
    RuntimeError("std::bad_alloc"),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("cudaHostAlloc failed: out of memory"),
    RuntimeError("could not create a primitive"),
]
OTHER = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: invalid argument"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("out of resource: shared memory, Required: 147456, Hardware limit: 101376"),
    RuntimeError("4,096 bytes to be page-locked are registered with CUDA already"),
    RuntimeError("could not create a primitive descriptor for a matmul primitive"),
    ValueError("a row asks: why does CUDA error: out of memory come?"),
    OSError(errno.ENOSPC, "No space left on device"),
]


def named(error: BaseException) -> str:
    return f"{type(error).__name__} {str(error)[:60]}"


@pytest.mark.parametrize("error", MEMORY, ids=named)
def test_memory_that_gives_out_is_conceded_to_in_loading_and_in_a_pass(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)  # of this whole process, twice a case
    assert is_out_of_memory(error)
    raised, conceded = [error], []
    plans = SimpleNamespace(plan=None, before_passes=conceded.append)
    loaded: Any = SimpleNamespace(engine=SimpleNamespace(split_retry=SimpleNamespace()))

    def load(plan: Any) -> Any:
        if raised:
            raise raised.pop()
        return loaded

    assert load_with_fallback(load, plans) is loaded  # type: ignore[arg-type]
    assert len(conceded) == 1
    replay = SplitRetry(load, lambda: None)
    raised.append(error)
    assert isinstance(replay._attempt(None), str)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", OTHER, ids=named)
def test_what_no_smaller_plan_mends_ends_the_job(error: Exception) -> None:
    assert not is_out_of_memory(error)

    def fail(plan: Any) -> Any:
        raise error

    with pytest.raises(type(error)):
        load_with_fallback(fail, SimpleNamespace(plan=None))  # type: ignore[arg-type]
    with pytest.raises(type(error)):
        SplitRetry(fail, lambda: None)._attempt(None)  # type: ignore[arg-type]


UNMAPPED = "failed to map segment from shared object"
LOADING = [
    (ImportError(f"/v/site-packages/torch/_C.cpython-311-x86_64-linux-gnu.so: {UNMAPPED}"), "torch"),
    (OSError("libtorch_cpu.so: cannot create shared object descriptor: Cannot allocate memory"), "torch"),
    (ImportError(f"libopenblas.so: {UNMAPPED}"), "libopenblas.so"),
]


def limit_data(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    unlimited = resource.RLIM_INFINITY
    limits = {resource.RLIMIT_DATA: limit, resource.RLIMIT_AS: unlimited}
    monkeypatch.setattr(memory.resource, "getrlimit", lambda kind: (limits[kind], unlimited))


@pytest.mark.parametrize(("error", "library"), LOADING, ids=["torch", "torch by ctypes", "another library"])
def test_a_library_that_a_limit_keeps_out_is_named_with_the_limit(
    error: Exception, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_data(monkeypatch, 900 << 20)
    wanted = f"{library} cannot be loaded within the limit on data (ulimit -d) of 900 MiB; raise it"
    assert memory.refused_library(error) == wanted
    wrapped = RuntimeError("Failed to import transformers.modeling_utils")
    wrapped.__cause__ = error
    assert memory.refused_library(wrapped) == wanted
    # The same words without a limit are of a file system that forbids execution, say.
    limit_data(monkeypatch, resource.RLIM_INFINITY)
    assert memory.refused_library(error) == ""


@pytest.mark.parametrize("error", [*MEMORY, *OTHER, ImportError("No module named 'torch'")], ids=named)
def test_other_errors_under_a_limit_name_no_library(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_data(monkeypatch, 900 << 20)
    assert memory.refused_library(error) == ""
