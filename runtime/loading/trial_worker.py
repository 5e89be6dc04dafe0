"""The process that tries one family of GPU kernels for `isolated_trial`, and prints why it cannot be used."""

from __future__ import annotations

import json
import os
import sys

import torch

from ...offload.device import find_device
from ...quant.kernels.gpu import Gpu, lack_of
from .isolated_trial import RESULT, KernelNeeds
from .kernel_trial import family_trials


def main(request: str) -> None:
    wanted = json.loads(request)
    torch.cuda.set_device(wanted["index"])
    device = find_device()
    assert device is not None
    needs = KernelNeeds(wanted["dtype"], frozenset(wanted["heads"]))
    trials = family_trials(device.torch_device, Gpu(device.capability, device.processors), needs)
    print(f"{RESULT}{lack_of(trials[wanted['family']])}", flush=True)
    # At once: if CUDA answers no more, what else runs at the end of a process would abort it.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
