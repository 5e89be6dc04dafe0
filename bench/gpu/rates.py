"""What the device does by itself: copies over the link and within its memory, products by rows."""

from __future__ import annotations

from typing import Any

import torch

from moedge.offload.machine.link import measure_link, measure_pin_limit
from moedge.offload.machine.timing import best_seconds
from moedge.quant.matmul.parallel import ParallelMatmul
from moedge.quant.matmul.workspace import Workspace
from moedge.quant.scratch import scratch_nbytes
from moedge.quant.tensor import pack

ROWS = (1, 16, 64, 256, 1024, 4096)
SIZE = 4096


def link() -> dict[str, Any]:
    """bytes/s from the host, pinned and pageable, by size of one copy."""
    rates = {f"{mib} MiB": measure_link(mib << 20) for mib in (1, 4, 16, 256)}
    return {
        "pinned_bytes_s": {size: rate and rate.pinned_bytes_s for size, rate in rates.items()},
        "pageable_bytes_s": {size: rate and rate.pageable_bytes_s for size, rate in rates.items()},
    }


def pinning() -> dict[str, Any]:
    limit = measure_pin_limit(16 << 30)
    return {"pinned_nbytes": limit and limit.nbytes, "refused": limit and limit.refused}


def device_copy() -> dict[str, Any]:
    """Bytes read plus bytes written per second of a copy within the device's memory."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return {"bytes_s": 2 * len(source) / _seconds(lambda: target.copy_(source))}


def products() -> dict[str, Any]:
    """FLOP/s of bf16 rows with a packed matrix [4096, 4096], by weight format and rows."""
    weight = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
    rates: dict[str, Any] = {}
    for name in ("none", "int8", "nf4"):
        packed = pack(weight, name)
        compute = ParallelMatmul(Workspace(scratch_nbytes(packed.layout, "bfloat16", False), "cuda"))
        for rows in ROWS:
            x = torch.randn(rows, SIZE, dtype=torch.bfloat16, device="cuda")
            seconds = _seconds(lambda x=x, packed=packed, compute=compute: compute.linear(x, packed))
            rates.setdefault(name, {})[str(rows)] = 2 * rows * SIZE * SIZE / seconds
    return {"flop_s": rates}


def widening() -> dict[str, Any]:
    """Weights per second that each format is widened at to bf16."""
    weight = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(weight)
    packs = {name: pack(weight, name) for name in ("int8", "nf4")}
    return {"weights_s": {name: weight.numel() / _seconds(lambda p=p: p.dequantize(out)) for name, p in packs.items()}}


def _seconds(run: Any) -> float:
    def synchronous() -> None:
        run()
        torch.cuda.synchronize()

    return best_seconds(synchronous, 0.2)
