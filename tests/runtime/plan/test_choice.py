"""What a choice of formats depends on: free disk space and loading count, what ran before does not."""

from dataclasses import replace

import pytest

from moedge.formatting import loss_line
from moedge.offload.machine.profile import Overheads
from moedge.quant.native import library
from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.loading_cost import LoadingSpeeds, Prepared, loading_cost, store_nbytes
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import PlanRequest, solve
from moedge.runtime.plan.rates import Rates
from moedge.runtime.settings.errors import DoesNotFit, SettingError
from moedge.runtime.settings.settings import MemoryBudget, Settings
from moedge.runtime.shape.shards import bits_lost, offered_formats
from moedge.what_if import suggestions
from support.known_shapes import plain_model

GIB = 1 << 30
# A family whose experts are stored transposed: its weights are copied to disk in every format.
SHAPE = replace(plain_model(num_layers=8), model_type="gpt_oss")
QUICK = LoadingSpeeds(2e9, 2e9, {"none": 2e9, "int8": 1e9, "nf4": 5e8, "int4": 1e9}, 2e9)
# Arithmetic takes longest, and the same in every format, so that nothing but loading tells formats apart.
COSTS = Overheads(1e-3, 1e-5, 1e-5, 1e-7, 1e-6, 1e-5)
RATES = Rates(4e9, 2e10, 1e10, COSTS, otherwise={1: 1e10, 64: 1e11}, measured=True, loading=QUICK)
JOB = Workload(64, 160, 160, 64 * 128, 64 * 32)


def request(ram: float, disk: float | None, rates: Rates = RATES, **found: object) -> PlanRequest:
    """With passes that are given the search is short; formats are chosen all the same."""
    budget = MemoryBudget(int(ram * GIB), None, None if disk is None else int(disk * GIB))
    passes = Settings(tokens_per_pass=1024)
    return PlanRequest(costs=CostModel(SHAPE, rates), workload=JOB, budget=budget, settings=passes, **found)  # type: ignore[arg-type]


def test_no_format_is_chosen_whose_prepared_weights_the_disk_has_no_free_bytes_for() -> None:
    """6.4 GiB of weights and 5 of memory: the model's own precision where the disk takes it, else one that fits."""
    free = solve(request(5, None))
    store = store_nbytes(SHAPE, free.plan)
    assert (free.plan.quant, free.plan.streams) == ("none", True)
    assert solve(request(5, store / GIB)).plan.quant == "none"
    short = solve(request(5, (store - 1) / GIB))
    assert short.plan.quant != "none"
    assert "none" not in short.seconds
    assert not short.plan.streams or store_nbytes(SHAPE, short.plan) < store
    # Bytes that an earlier run wrote are not needed once more.
    begun = Prepared({"none": GIB})
    assert solve(request(5, (store - GIB) / GIB, prepared=begun)).plan.quant == "none"
    with pytest.raises(DoesNotFit, match=r"prepared weights of .* GiB do not fit the 1\.00 GiB that --disk"):
        solve(request(1, 1))


def test_weights_that_lie_in_the_files_as_they_are_need_no_disk() -> None:
    shape = plain_model(num_layers=8)
    asked = replace(request(3, 0), costs=CostModel(shape, RATES)).with_settings(quant="none")
    found = solve(asked)
    assert found.plan.streams
    assert (found.prediction.written_nbytes, found.ledger.tiers["disk"].planned) == (0, 0)
    with pytest.raises(DoesNotFit, match="--disk"):
        solve(request(3, 0).with_settings(quant="none"))
    # In another dtype, or quantized, the bytes are others.
    for other in ({"quant": "none", "dtype": "fp16"}, {"quant": "int8"}):
        with pytest.raises(DoesNotFit, match="--disk"):
            solve(replace(asked, budget=MemoryBudget(2 * GIB, None, 0)).with_settings(**other))


def test_loading_counts_in_the_choice() -> None:
    """A short job in the model's own precision would write a store for longer than it runs."""
    slow_disk = replace(RATES, loading=replace(QUICK, write_bytes_s=2e7))
    assert solve(request(5, None)).plan.quant == "none"
    chosen = solve(request(5, None, slow_disk))
    assert (chosen.plan.quant, chosen.plan.streams) == ("int8", False)
    assert chosen.seconds["none"] > 1.5 * min(chosen.seconds.values())
    slow_int4 = replace(RATES, loading=replace(QUICK, pack_bytes_s={**QUICK.pack_bytes_s, "int4": 1e7}))
    seconds = solve(request(2, None, slow_int4)).seconds
    assert seconds["int4"] > seconds["none"]


@pytest.mark.sample("4", "12")
@pytest.mark.parametrize("ram", [2, 4, 5, 12])
def test_the_choice_does_not_depend_on_what_ran_before(ram: float) -> None:
    fresh = solve(request(ram, 40))
    there = Prepared(dict.fromkeys(("int8", "nf4"), 8 * GIB))
    taught = solve(request(ram, 40, prepared=there, corrections={"generating": 3.0, "loading": 2.0}))
    assert taught.plan == fresh.plan
    factor = 3.0
    assert taught.prediction.seconds == pytest.approx(factor * fresh.prediction.seconds)
    assert {quant: each / factor for quant, each in taught.seconds.items()} == pytest.approx(dict(fresh.seconds))


def test_variations_are_corrected_as_the_plan_is() -> None:
    """A change that gains nothing must not seem to gain because nothing was learned about it."""
    asked = request(3, 40).with_settings(max_sequences=4)
    plain, taught = (solve(replace(asked, corrections=learned)) for learned in ({}, {"generating": 4.0}))
    gains = [suggestions(each.request, each) for each in (plain, taught)]
    assert gains[0]
    assert [(one.change, round(one.gain, 9)) for one in gains[0]] == [
        (one.change, round(one.gain, 9)) for one in gains[1]
    ]


def test_loading_takes_the_checkpoint_through_every_step_and_writes_what_streams() -> None:
    held, streaming = solve(request(16, None)).plan, solve(request(3, None).with_settings(quant="none")).plan
    checkpoint, passes = SHAPE.parameters * 2, (1.0, 0.5)
    cost = loading_cost(SHAPE, held, QUICK, 4e9, Prepared(), passes)
    assert (cost.read_s, cost.quantize_s) == (pytest.approx(checkpoint / 2e9), pytest.approx(checkpoint / 1e9))
    assert (cost.write_s, cost.written_nbytes) == (0.0, 0)
    assert cost.first_passes_s == pytest.approx(1.0 + 0.5 * (held.kv == "int8"))
    written = loading_cost(SHAPE, streaming, QUICK, 4e9, Prepared(), passes)
    assert written.written_nbytes == store_nbytes(SHAPE, streaming)
    assert written.write_s == pytest.approx(written.written_nbytes / 2e9)
    assert written.first_passes_s > 1.5
    there = Prepared({"none": written.written_nbytes})
    again = loading_cost(SHAPE, streaming, QUICK, 4e9, there, passes)
    assert (again.written_nbytes, again.quantize_s) == (0, 0.0)
    assert again.read_s == pytest.approx(streaming.held_nbytes / 4e9)
    assert loading_cost(SHAPE, streaming, QUICK, 4e9, Prepared(is_model=True), passes) == again
    half = loading_cost(SHAPE, streaming, QUICK, 4e9, Prepared({"none": written.written_nbytes // 2}), passes)
    assert half.written_nbytes == pytest.approx(written.written_nbytes / 2, abs=1)


def test_a_plan_with_one_open_format_has_its_loading_and_generating_seconds() -> None:
    told = solve(
        PlanRequest(costs=CostModel(SHAPE), workload=JOB, budget=MemoryBudget(4 * GIB), settings=Settings(quant="nf4"))
    )
    assert told.seconds == {"nf4": pytest.approx(told.prediction.total_s)}
    assert told.prediction.loading_s > SHAPE.parameters * 2 / 5e8


@pytest.mark.parametrize(
    ("bits", "packed", "said"),
    [(6, "int4", 6), (5, "nf4", 5), (6, "int8", 0), (8, "int4", 0), (4, "int4", 0), (0, "nf4", 0)],
)
def test_a_loss_that_more_bits_would_avoid_is_explained(bits: int, packed: str, said: int) -> None:
    """Where int8 does not fit: `auto` takes it before formats of fewer bits than the files have."""
    layers = tuple(
        replace(layer, dense=tuple(replace(matrix, bits=bits) for matrix in layer.dense), experts=None)
        for layer in SHAPE.layers
    )
    shape = replace(SHAPE, layers=layers)
    assert bits_lost(shape, packed) == said
    assert offered_formats(shape)[0] == ("int8" if bits else "none")
    line = loss_line({"attention": 0.07}, bits_lost(shape, packed))
    assert line.startswith("weights were packed again; relative L2 error against the checkpoint: attention 7 %")
    assert (f"the files have {bits} bits a weight, and --quant int8 would lose less" in line) == bool(said)
    assert loss_line({}, 6) == ""


@pytest.mark.skipif(not library.available(), reason="the library of CPU kernels is not usable here")
def test_activations_are_rounded_where_that_is_measured_to_be_faster() -> None:
    shape = plain_model(num_layers=8)
    slow, fast = {1: 1e9, 64: 1e10}, {1: 1e10, 64: 1e11}

    def chosen(rates: dict[str, dict[int, float]], **settings: object) -> tuple[str, str]:
        costs = CostModel(shape, replace(RATES, flop_s=rates))
        plan = solve(replace(request(5, None), costs=costs).with_settings(**{"quant": "int4", **settings})).plan
        return plan.quant, plan.compute

    assert chosen({"int4": slow, "int4xint8": fast}) == ("int4", "int8")
    assert chosen({"int4": fast, "int4xint8": slow}) == ("int4", "float")
    assert chosen({}) == ("int4", "float"), "nobody measured"
    slightly = {rows: 1.05 * rate for rows, rate in slow.items()}
    assert chosen({"int4": slow, "int4xint8": slightly}) == ("int4", "float"), "too little for what it loses"
    faster = {"int4": slow, "int4xint8": fast}
    assert chosen(faster, compute="float") == chosen(faster, deterministic=True) == ("int4", "float")
    assert chosen(faster, dtype="fp32") == ("int4", "float")
    assert chosen(faster, quant="nf4") == ("nf4", "float"), "its levels are no integers"
    assert chosen({"int8": slow, "int8xint8": fast}, quant="int8") == ("int8", "int8")
    assert chosen({"int4": fast, "int4xint8": slow}, compute="int8") == ("int4", "int8")
    for wrong in ({"quant": "nf4"}, {"quant": "int4", "dtype": "fp32"}):
        with pytest.raises(SettingError, match="compute int8 multiplies int8 weights"):
            chosen({}, compute="int8", **wrong)
