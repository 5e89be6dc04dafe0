"""`runtime/shape/shards.py` and plans with `--experts`: routed experts in a format of their own."""

from dataclasses import replace

import pytest

from moedge.quant.formats.format import EXPERT_FORMATS
from moedge.quant.kernels.gpu import Gpu
from moedge.runtime.jobs.request import pin_settings, settings_of
from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import PlanRequest, solve
from moedge.runtime.plan.rates import Rates, rates_of
from moedge.runtime.settings.errors import SettingError
from moedge.runtime.settings.settings import DeviceBudget, MemoryBudget, Settings
from moedge.runtime.shape.shards import FORMATS, as_found, model_shards, open_formats, workspace_nbytes
from moedge.what_if import suggestions
from support.known_shapes import plain_model
from support.plans_page import machine

GIB = 1 << 30
SHAPE = plain_model(num_layers=8)
JOB = Workload(64, 160, 160, 64 * 128, 64 * 32)


def request(
    ram: float, quant: str = "auto", device: DeviceBudget | None = None, rates: Rates | None = None, **settings: object
) -> PlanRequest:
    budget = MemoryBudget(int(ram * GIB), device)
    asked = Settings(quant=quant, tokens_per_pass=1024, **settings)  # type: ignore[arg-type]
    return PlanRequest(costs=CostModel(SHAPE, rates or Rates()), workload=JOB, budget=budget, settings=asked)


@pytest.mark.parametrize(("experts", "bits"), [("int3", 3.5), ("vq2", 2.75)])
@pytest.mark.parametrize("quant", FORMATS)
def test_experts_alone_are_in_the_format_of_experts(quant: str, experts: str, bits: float) -> None:
    mixed, plain = model_shards(SHAPE, f"{quant}+{experts}", "bf16"), model_shards(SHAPE, quant, "bf16")
    assert [layer.dense for layer in mixed.layers] == [layer.dense for layer in plain.layers]
    assert mixed.head == plain.head
    for layer, shape in zip(mixed.layers, SHAPE.layers, strict=True):
        assert layer.expert is not None
        assert shape.experts is not None
        assert {matrix.layout.format for matrix in layer.expert.matrices} == {experts}
        nbytes = sum(matrix.layout.nbytes for matrix in layer.expert.matrices)
        assert 8 * nbytes == pytest.approx(bits * shape.experts.numel, rel=1e-3)
    tiles = model_shards(SHAPE, f"{quant}+{experts}", "bf16", "tiles")
    assert tiles.nbytes == mixed.nbytes
    assert {matrix.layout.order for matrix in tiles.layers[0].expert.matrices} == {"tiles"}  # type: ignore[union-attr]
    assert workspace_nbytes(SHAPE, f"{quant}+{experts}", "bf16", False) >= workspace_nbytes(SHAPE, quant, "bf16", False)


def test_options_name_both_formats_and_jobs_keep_them() -> None:
    assert settings_of({"quant": "int8", "experts": "int3"}).quant == "int8+int3"
    assert settings_of({"experts": "int3"}).quant == "auto+int3"
    assert settings_of({"quant": "int8", "experts": "same"}).quant == "int8"
    assert as_found("auto+int3", "int8+int3") == "int8+int3"
    assert as_found("auto+int3", "int8") != "int8", "a job of other experts is another one"
    assert as_found("auto", "int8+int3") == "int8+int3"
    plan = solve(request(8, "auto+int3")).plan
    recorded = {name: getattr(plan, name) for name in ("dtype", "quant", "kv", "compute", "deterministic")}
    assert (
        solve(replace(request(8), settings=pin_settings(Settings(), {"identity": recorded}))).plan.quant == plan.quant
    )


def test_auto_takes_no_such_experts_and_chooses_among_all_other_formats_with_them() -> None:
    assert not any("+" in quant for ram in (1, 2, 4, 16) for quant in solve(request(ram)).seconds)
    assert open_formats(SHAPE, "auto+int3") == ("none+int3", "int8+int3", "int4+int3", "nf4+int3")
    assert solve(request(16, "auto+int3")).plan.quant == "none+int3"
    assert solve(request(16, "int4+int3")).plan.quant == "int4+int3"


def test_less_is_read_where_experts_stream_and_plans_say_so() -> None:
    asked = request(1.2, "int8")
    found = solve(asked)
    assert found.plan.streams
    better = {each.change: each for each in suggestions(asked, found) if each.change.startswith("--experts")}
    assert better["--experts vq2"].gain >= better["--experts int3"].gain > 1
    assert all("GiB of weights instead of" in each.note for each in better.values())
    assert "--calibrate" in better["--experts vq2"].note
    assert not any(each.change.startswith("--experts") for each in suggestions(request(16), solve(request(16))))


@pytest.mark.parametrize("experts", EXPERT_FORMATS)
def test_experts_in_such_formats_are_computed_by_the_kernels_of_a_gpu(experts: str) -> None:
    device = DeviceBudget(8 * GIB, GIB, GIB, Gpu((8, 6), 28))
    plan = solve(request(8, f"int8+{experts}", device)).plan
    assert plan.quant == f"int8+{experts}"
    assert plan.grouped_products


def test_less_crosses_the_link_to_a_gpu_and_plans_say_so() -> None:
    device = DeviceBudget(2 * GIB, GIB, GIB, Gpu((8, 9), 24))
    asked = request(8, "int4", device, rates_of(machine("RTX 4060 8GB"), on_device=True))
    found = solve(asked)
    assert not found.plan.streams, "host memory has all experts"
    assert found.plan.held_nbytes < found.plan.weights_nbytes
    better = {each.change: each for each in suggestions(asked, found) if each.change.startswith("--experts")}
    assert better["--experts vq2"].gain > better["--experts int3"].gain > 1
    assert "--calibrate" in better["--experts vq2"].note


def test_what_has_no_such_experts_is_refused() -> None:
    dense = replace(SHAPE, layers=tuple(replace(layer, experts=None) for layer in SHAPE.layers))
    with pytest.raises(SettingError, match=r"without routed experts was found; leave --experts away$"):
        open_formats(dense, "int8+int3")
    with pytest.raises(SettingError, match="no weight of this checkpoint has codes"):
        open_formats(SHAPE, "kept+int3")
