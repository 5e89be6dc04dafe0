"""How fast a GPU does what a pass does there: products alone, experts in one launch, attention, and what is left.

For the profile of its machine; rates are named as predictions look them up (plan/cost_model.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.resources import as_file, files
from itertools import cycle

import torch

from ...offload.device import Device
from ...offload.errors import is_out_of_memory
from ...offload.machine.profile import ATTENTION, TOGETHER, Overheads
from ...offload.machine.timing import best_seconds
from ...quant.formats.format import QUANT_FORMATS
from ...quant.kernels import tuning
from ...quant.kernels.gpu import Gpu
from ...quant.kv.format import KV_FORMATS
from ...quant.matmul.matmul import ParallelMatmul, Workspace
from ...quant.scratch import scratch_nbytes
from ...quant.tensor import TORCH_DTYPES, dtype_name
from ..kv.spec import KVSpec
from ..loading.machine_memory import budget_of
from ..plan.placement import Workload
from ..plan.planner import choose_dtype, make_plan
from ..settings.errors import DoesNotFit
from ..settings.settings import MemoryBudget, Settings
from ..shape.model_shape import KVGroup
from ..source.model_source import open_source
from .pass_rates import (
    CHUNK,
    HEAD_DIM,
    KV_HEADS,
    LOOKED_AT,
    PASS_KINDS,
    PASS_TOKENS,
    ROWS,
    SHAPE,
    attend_once,
    attention_cache,
    attention_flop,
    matrices_of,
    solve_overheads,
    timed_passes,
)

# Calls that are submitted before the device is waited for: a pass does not wait after every one either.
IN_FLIGHT = 8
EXPERT_ROWS = (1, 16, 64, 256)
NUM_EXPERTS = 32
# Bytes of keys and values; enough for a kernel to take longer than submitting it.
CACHE_NBYTES = 192 << 20
_SECONDS = 0.03
_MODEL_NBYTES = 1 << 30


@torch.inference_mode()
def device_rates(device: Device, gpu: Gpu) -> dict[str, dict[int, float]]:
    """FLOP/s on a device by operation, then by rows, in the dtype of most models there; some seconds.

    Of the kernels that run there, as `gpu` says, experts are computed in one launch and attention reads a paged cache.
    """
    dtype = TORCH_DTYPES[choose_dtype("auto", "bf16", gpu)]
    rates = {name: {rows: _alone(device, name, dtype, rows) for rows in ROWS} for name in QUANT_FORMATS}
    if not gpu.lacks.experts:
        rates |= {TOGETHER.format(name): _together(device, name, dtype) for name in tuning.FORMATS}
    if not gpu.lacks.attention:
        formats = [name for name in KV_FORMATS if TORCH_DTYPES.get(name, dtype) == dtype]
        rates |= {ATTENTION.format(name): _attention(device, gpu, name, dtype) for name in formats}
    device.give_back()
    return rates


def _alone(device: Device, format_name: str, dtype: torch.dtype, num_rows: int) -> float:
    matrices = cycle(matrices_of(format_name, dtype, device.torch_device, IN_FLIGHT))
    nbytes = scratch_nbytes(next(matrices).layout, dtype_name(dtype), deterministic=False)
    compute = ParallelMatmul(Workspace(nbytes, device.torch_device))
    x = torch.randn(num_rows, SHAPE[1]).to(device.torch_device, dtype)
    y = x.new_empty(num_rows, SHAPE[0])
    return 2 * num_rows * SHAPE[0] * SHAPE[1] / _seconds(device, lambda: compute.linear(x, next(matrices), out=y))


def _together(device: Device, format_name: str, dtype: torch.dtype) -> dict[int, float]:
    """Rows of each of NUM_EXPERTS matrices, in one launch."""
    # Imports Triton.
    from ...quant.kernels.product import GroupedProduct

    matrices = matrices_of(format_name, dtype, device.torch_device, NUM_EXPERTS)
    product, rates = GroupedProduct(device.torch_device), {}
    for rows in EXPERT_ROWS:
        x = torch.randn(NUM_EXPERTS * rows, SHAPE[1]).to(device.torch_device, dtype)
        spans = [slice(first, first + rows) for first in range(0, len(x), rows)]
        launch = product.launch(x, x.new_empty(len(x), SHAPE[0]), matrices, [], product.rows(spans, x))
        rates[rows] = 2 * len(x) * SHAPE[0] * SHAPE[1] / _seconds(device, launch.run)
    return rates


def _attention(device: Device, gpu: Gpu, kv_format: str, dtype: torch.dtype) -> dict[int, float]:
    """One token each of many sequences, and pieces of prompts."""
    # Imports Triton.
    from ..attention.triton_backend import TritonAttention

    token_nbytes = KVSpec(KVGroup((0,), KV_HEADS, HEAD_DIM, None), kv_format).token_nbytes
    num_sequences = max(1, int(CACHE_NBYTES / (token_nbytes * LOOKED_AT)))
    cache = attention_cache(kv_format, num_sequences, device.torch_device)
    attention = TritonAttention(cache, dtype, False, gpu, device.torch_device, not gpu.lacks.cache)
    rates = {}
    for count, sequences in ((1, num_sequences), (CHUNK, min(8, num_sequences))):
        attend = attend_once(cache, attention, dtype, sequences, count)
        rates[count] = attention_flop(sequences, count) / _seconds(device, attend)
    return rates


def _seconds(device: Device, call: Callable[[], object]) -> float:
    """Of one of several calls in flight; the first is not counted, for which Triton compiles."""

    def calls() -> None:
        for _ in range(IN_FLIGHT):
            call()
        device.synchronize()

    return best_seconds(calls, _SECONDS) / IN_FLIGHT


def device_overheads(device: Device, gpu: Gpu) -> Overheads | None:
    """The fixed costs of passes on a device, measured with the bundled small model, all of whose weights are there.

    None where the device has too little memory for it.
    """
    taken = budget_of(device, 0, gpu)
    granted = replace(taken, nbytes=taken.context_nbytes + _MODEL_NBYTES)
    memory = MemoryBudget(taken.process_nbytes + _MODEL_NBYTES, granted)
    most = max(count for count, _ in PASS_KINDS)
    settings = Settings(quant="none", tokens_per_pass=PASS_TOKENS, max_sequences=most)
    with as_file(files("moedge.demo")) as bundle, open_source(str(bundle / "model")) as source:
        try:
            plan = make_plan(source.shape, settings, memory, Workload(most, 128))
            return solve_overheads(source.shape, list(timed_passes(source, plan, None, device)))
        except (DoesNotFit, RuntimeError) as error:
            if isinstance(error, DoesNotFit) or is_out_of_memory(error):
                return None
            raise
