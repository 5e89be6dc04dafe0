"""An error of CUDA that was dealt with (`offload/errors.py`) is raised at nobody."""

import pytest
import torch

from moedge.offload import errors as cuda_error
from moedge.offload.device import MIN_PIN_NBYTES, Pinned, address_of, allocate
from moedge.offload.errors import prepare_to_swallow, swallow_cuda_error


def test_the_stale_error_is_raised_at_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = [RuntimeError("CUDA error: out of memory")]
    allocated: list[int] = []

    class Spare:
        def fill_(self, value: int) -> None:
            if stale:
                raise stale.pop()

    def allocate(size: int, device: str) -> Spare:
        assert device == "cuda"
        allocated.append(size)
        return Spare()

    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(cuda_error, "_spare", [])
    prepare_to_swallow()
    swallow_cuda_error()
    assert stale == []
    swallow_cuda_error()
    assert allocated == [1], "an allocator that refuses would keep the kernel from being launched"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_works_on_after_a_refused_registration() -> None:
    prepare_to_swallow()
    slab = allocate(MIN_PIN_NBYTES)
    first = Pinned(torch.cuda.cudart(), address_of(slab), len(slab), swallow_cuda_error)
    with pytest.raises(RuntimeError, match="registered with CUDA already"):
        Pinned(torch.cuda.cudart(), address_of(slab), len(slab), swallow_cuda_error)
    assert first.nbytes == len(slab)
    assert torch.ones(4, device="cuda").sum().item() == 4
    first.close()
