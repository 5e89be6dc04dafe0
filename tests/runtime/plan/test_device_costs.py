"""The constants of passes on a GPU (`runtime/plan/presets.py`) are what this code does: launches, tiles of the
sampler, bytes of torch.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moedge.offload.machine.profile import HEADS, TOGETHER, PinLimit
from moedge.quant.formats.format import ASSUMED, ROWS, get_format
from moedge.quant.matmul.matmul import Matmul, Workspace
from moedge.quant.scratch import scratch_nbytes
from moedge.quant.tensor import PackedTensor
from moedge.runtime.attention.kernels.operands import decode_cut, extend_cut
from moedge.runtime.plan import presets
from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.planner import solve
from moedge.runtime.plan.presets import SHARED_HEADS, with_preset
from moedge.runtime.plan.rates import Curve, rates_of
from moedge.runtime.settings.settings import Settings
from support.plans_page import GIB, JOB, ROOT, machine, question, shape_of

VIEWS = {
    "view", "_unsafe_view", "slice", "select", "t", "transpose", "unsqueeze", "unbind", "as_strided", "expand",
    "permute", "alias", "detach", "reshape", "squeeze", "split", "empty", "new_empty", "empty_like", "narrow",
}  # fmt: skip
# Gate and up of an expert of Qwen3-30B-A3B, and its last matrix.
EXPERT = ((1536, 2048), (2048, 768))


class Counted(TorchDispatchMode):
    """Counts operations that compute, and the bytes of what they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.nbytes = 0, 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if op.__name__.split(".")[0] not in VIEWS:
            self.launches += 1
            read = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, torch.Tensor)]
            made = [result] if isinstance(result, torch.Tensor) else []
            pointers = {each.data_ptr() for each in read}
            tensors = read + [each for each in made if each.data_ptr() not in pointers]
            self.nbytes += sum(each.numel() * each.element_size() for each in tensors)
        return result


def test_layers_and_passes_start_as_many_kernels() -> None:
    counts = json.loads((Path(__file__).parents[2] / "device" / "host_cost.json").read_text())["figures"]

    def launches(mode: str, kind: str) -> tuple[int, int]:
        layer, whole = (counts[mode][kind][part][2] for part in ("layer", "pass"))
        # Of three layers.
        return layer, whole - 3 * layer

    for kind, prompts in (("prompts", True), ("decode", False)):
        for mode, by_torch in (("all", False), ("held, no kernels", True)):
            layer, beside = launches(mode, kind)
            assert layer == pytest.approx(presets.layer_share(prompts, by_torch) * presets.LAYER_LAUNCHES)
            assert beside == presets.PASS_LAUNCHES or by_torch
        assert launches("held", kind)[1] == presets.PASS_LAUNCHES
        assert launches("held", kind)[0] == pytest.approx(launches("all", kind)[0], rel=0.1)
    replayed = launches("held, graphs", "decode")[0]
    assert replayed == presets.DECODE_GRAPH_LAUNCHES
    # Attention is started as without graphs.
    more = launches("held", "prompts")[0] - launches("held", "decode")[0]
    assert replayed + more == presets.GRAPH_LAUNCHES
    assert presets.layer_share(False, False, graphs=True) * presets.LAYER_LAUNCHES == pytest.approx(replayed)


# An H200 has the multiprocessors, the clock and the link of an H100.
H200 = replace(presets.PRESETS["H100 80GB"], gib=141, bandwidth=4800)


def _measured() -> Iterator[tuple[str, float, float]]:
    """Kernels that an H200 (experts) and an H100 (attention to native keys) ran, with the tiles that they have now:
    what was measured, and what the preset says. Attention to codes has changed since a GPU timed it.
    """
    record, experts = (
        json.loads((ROOT / f"docs/measurements/gpu/{name}-kernels.json").read_text()) for name in ("h100", "h200")
    )
    rates = with_preset("H200", H200, machine("H100 80GB").hardware, None).device_flop_s
    for each in experts["experts"]:
        name, rows = each["product"], each["rows_per_expert"]
        flop = 2 * 128 * rows * math.prod(EXPERT[name == "down"])
        rate = Curve(rates[TOGETHER.format(each["format"])]).at(rows)
        yield f"{name} {each['format']} {rows}", each["us"] * 1e-6, flop / rate
    rates = machine("H100 80GB").device_flop_s
    for each in (one for one in record["attention"] if one["kv"] == "native"):
        head, decodes = each["head"], each["kernel"] == "decode"
        cut = decode_cut((9, 0), head, 8, False) if decodes else extend_cut(head, 8, False, False)
        if (cut.rows, cut.keys, cut.warps, cut.stages) == tuple(each[of] for of in ("rows", "keys", "warps", "stages")):
            rate = Curve(rates[HEADS.format("bf16", head)]).at(1 if decodes else 512)
            # 128 sequences of 1,024 tokens in 4 KV heads; 512 tokens after 1,024 and 1,024 after none in 32 heads.
            elements = 128 * 1024 * 4 * 2 * head
            flop = 2 * SHARED_HEADS * elements if decodes else 4 * (512 * 1280 + 1024 * 512) * 32 * head
            read_s = elements * 2 / machine("H100 80GB").device_memory_bytes_s if decodes else 0.0
            yield f"{each['kernel']} native {head}", each["us"] * 1e-6, max(read_s, flop / rate)


def test_a_preset_says_what_every_kernel_took_within_one_and_a_half_times() -> None:
    """By counts and one share of each resource; what is further off is named with its ratio."""
    found = {name: predicted / measured for name, measured, predicted in _measured()}
    assert len(found) > 30
    off = {name: ratio for name, ratio in found.items() if not 1 / 1.5 < ratio < 1.5}
    assert not off


@pytest.mark.parametrize("quant", ["none", "int8", "int4", "int3", "vq2"])
def test_torch_moves_as_many_bytes_for_a_weight(quant: str) -> None:
    """With few rows, so that activations hardly count. nf4 and mxfp4 are unpacked by calls that aten does not see.

    On the device without memory, for which operations are those of a GPU.
    """
    numel, nbytes = 0, 0
    for shape in EXPERT:
        layout = get_format(quant).in_order(ROWS).layout(shape, "bfloat16")
        packed = PackedTensor.bind(layout, torch.empty(layout.nbytes, dtype=torch.uint8, device="meta"))
        multiply = Matmul(Workspace(scratch_nbytes(layout, "bfloat16", False), "meta"), gemv_max_rows={})
        x = torch.empty(4, shape[1], dtype=torch.bfloat16, device="meta")
        with torch.inference_mode(), Counted() as counted:
            multiply._multiply_strips(x, packed, x.new_empty(4, shape[0]))
        numel, nbytes = numel + shape[0] * shape[1], nbytes + counted.nbytes
    assert nbytes / numel == pytest.approx(ASSUMED[quant].dense_nbytes, rel=0.05)


@pytest.mark.parametrize(
    ("quant", "most"), [("int8", 4), ("int4", 4), ("mxfp4", 4), ("nf4", 5), ("int3", 3), ("vq2", 4)]
)
def test_a_weight_takes_few_instructions_in_tiles_of_few_rows(quant: str, most: int) -> None:
    """More of them, and a GPU that has few bytes a clock for each of its schedulers would wait for them."""
    assert 0 < max(counts[0] for counts in ASSUMED[quant].instructions.values()) <= most


# Native elements are two bytes, so that memory is waited for: their kernels have the tiles that an H100 timed.
MOST_OF_AN_ELEMENT = {"native": 7, "int8": 5, "int8/int4": 5, "int4": 5}


@pytest.mark.parametrize("kv", MOST_OF_AN_ELEMENT)
def test_an_element_of_keys_and_values_takes_few_instructions(kv: str) -> None:
    """Of one token of each sequence, whose keys and values are read once."""
    assert 0 < max(max(presets._DECODE[major][kv]) for major in (8, 9)) <= MOST_OF_AN_ELEMENT[kv]


@pytest.mark.slow
@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 120])
def test_instructions_are_those_that_kernels_compile_to(arch: int) -> None:
    """Of 8.0, 8.9 and 12.0 plans have the worst."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "matrix.compiling.instructions", str(arch)]
    # Compiled, not interpreted as in other tests.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_INTERPRET")}
    made = subprocess.check_output(command, cwd=ROOT / "tests", env=environment, text=True, timeout=1200)
    found = json.loads(made)[f"sm{arch}"]
    major = {75: 0, 90: 9}.get(arch, 8)

    def compare(counted: Iterable[float], planned: Iterable[float], what: str) -> None:
        for count, plan in zip(counted, planned, strict=True):
            assert count == pytest.approx(plan, rel=0.02) if major != 8 else count <= plan * 1.02, what

    for kind, planned in presets._DECODE[major].items():
        counted = found["decode"][kind]
        compare([counted[str(size)] for size in presets._HEADS], planned, f"decode {kind}")
        if major:
            assert max(counted.values()) <= MOST_OF_AN_ELEMENT[kind], kind
            prompts = [found["prompts"][kind][str(size)] for size in presets._HEADS]
            compare(prompts, presets._PROMPTS[major][kind], f"prompts {kind}")
    for name, counts in found["weights"].items():
        compare(counts.values(), ASSUMED[name].instructions[major], name)


def test_what_cannot_be_page_locked_crosses_the_link_at_the_speed_of_a_copy_in_host_memory() -> None:
    """Under WSL2 about 1 GiB can be; the rest is copied by the host into a page-locked ring first."""
    card, found, wall = "RTX 3060 12GB", machine("RTX 3060 12GB"), PinLimit(5 * GIB // 4, True)
    settings = Settings(quant="nf4", kv="int4", tokens_per_pass=512, max_sequences=128)
    plan = solve(question("Qwen3-30B-A3B", card, 32, settings)).plan
    assert plan.staging is not None
    assert plan.staging.disk_nbytes == 0
    free, walled = (
        CostModel(shape_of("Qwen3-30B-A3B"), rates_of(replace(found, pin=pin), on_device=True)).predict(plan, JOB)
        for pin in (None, wall)
    )
    assert found.link is not None
    link = found.link.pinned_bytes_s
    assert link is not None
    locked, copied_bytes_s = GIB / plan.staging.staged_nbytes, found.memory_bytes_s / 3
    assert copied_bytes_s < link
    assert free.busy_s["link"] == pytest.approx(free.link_nbytes / link)
    wanted = walled.link_nbytes * (locked / link + (1 - locked) / copied_bytes_s)
    assert walled.busy_s["link"] == pytest.approx(wanted)
