"""An error that was dealt with is raised at nobody."""

import pytest
import torch

from moedge.offload.errors import swallow_cuda_error
from moedge.offload.host_memory import MIN_PIN_NBYTES, Pinned, address_of, allocate


def test_the_stale_error_is_raised_at_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = [RuntimeError("CUDA error: out of memory")]

    def launch(size: int, device: str) -> None:
        assert device == "cuda"
        if stale:
            raise stale.pop()

    monkeypatch.setattr(torch, "ones", launch)
    swallow_cuda_error()
    assert stale == []
    swallow_cuda_error()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_works_on_after_a_refused_registration() -> None:
    slab = allocate(MIN_PIN_NBYTES)
    first = Pinned(torch.cuda.cudart(), address_of(slab), len(slab), swallow_cuda_error)
    again = Pinned(torch.cuda.cudart(), address_of(slab), len(slab), swallow_cuda_error)
    assert (first.nbytes, again.nbytes) == (len(slab), 0)
    assert torch.ones(4, device="cuda").sum().item() == 4
    first.close()
