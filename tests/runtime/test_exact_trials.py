"""Nothing shows in the bits of a deterministic row (`runtime/model/`, `runtime/engine/`), in any precision: a sample of
the trials of `make matrix`.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from moedge.quant.native import library
from moedge.runtime.source.model_source import open_source
from support.exact_trials import BUDGETS, Precision, Trial, Way, drawn, faults

SIZES = pytest.mark.parametrize("sizes", [{"num_hidden_layers": 2}, {}], ids=["2 layers", "all layers"])


@pytest.mark.sample("2 layers-bf16-int4-int8-int8")
@pytest.mark.parametrize("compute", ["int8", "float"])
@pytest.mark.parametrize("kv", ["int8", "int8/int4", "int4", "native"])
@pytest.mark.parametrize(("dtype", "quant"), [("bf16", "int4"), ("fp32", "int8"), ("bf16", "int8"), ("bf16", "mxfp4")])
@SIZES
def test_budgets_and_stores_show_in_no_bit(
    sizes: dict[str, int],
    dtype: str,
    quant: str,
    kv: str,
    compute: str,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    if compute == "int8" and quant != "int8" and not library.available():
        pytest.skip(f"no library of CPU kernels: {library.lack()}")
    precision = Precision(dtype, quant, dtype if kv == "native" else kv, compute)
    with open_source(str(checkpoint("qwen3_moe", **sizes))) as source:
        trial = Trial(source, tmp_path)
        wanted, _ = trial.run(precision, Way(kept=(0, 1)))
        for budget in ("whole", "least") if sizes else BUDGETS[1:]:
            found, happened = trial.run(precision, Way(budget=budget, kept=(0, 1)))
            assert found == wanted, budget
            assert bool(happened["streamed"]) == (budget != "whole")


# Drawn so that they stream, or come to preempting and parking.
@pytest.mark.sample("2 layers-qwen3_moe-1-streamed preempted parked")
@pytest.mark.parametrize(
    ("family", "variation", "happens"),
    [("qwen3_moe", 1, "streamed preempted parked"), ("deepseek_v2", 0, "preempted parked"), ("deepseek_v2", 2, "")],
)
@SIZES
def test_random_ways_show_in_no_bit(
    sizes: dict[str, int],
    family: str,
    variation: int,
    happens: str,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    with open_source(str(checkpoint(family, **sizes))) as source:
        found, happened = faults(Trial(source, tmp_path), *drawn(family, variation))
    assert found == []
    assert all(happened[what] for what in happens.split())
