"""What is measured of a device for plans (`runtime/calibration/pass_rates.py`): every operation that passes use there,
by the kernels that run there.
"""

from types import ModuleType
from typing import Any

import pytest

from moedge.quant.kernels.gpu import Gpu, Lacks
from moedge.runtime.calibration import pass_rates as measuring

AMPERE, WITHOUT_TENSOR_CORES = (8, 6), (7, 0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that the interpreter of kernels computes in a moment."""
    for name, value in {"NUM_EXPERTS": 2, "EXPERT_ROWS": (1, 4), "ROWS": (1, 4), "CACHE_NBYTES": 1 << 16}.items():
        monkeypatch.setattr(measuring, name, value)
    monkeypatch.setattr(measuring, "SHAPE", (64, 64))
    monkeypatch.setattr(measuring, "LOOKED_AT", 32)
    monkeypatch.setattr(measuring, "HEAD_DIM", 16)
    monkeypatch.setattr(measuring, "KV_HEADS", 1)
    monkeypatch.setattr(measuring, "HEADS", 2)
    monkeypatch.setattr(measuring, "CHUNK", 16)
    monkeypatch.setattr(measuring, "IN_FLIGHT", 1)
    monkeypatch.setattr(measuring, "_DEVICE_SECONDS", 0.0)
    monkeypatch.setattr(measuring, "QUANT_FORMATS", ("nf4",))
    monkeypatch.setattr(measuring.tuning, "FORMATS", ("nf4",))
    monkeypatch.setattr(measuring, "KV_FORMATS", ("fp32", "int8"))


def test_products_experts_and_attention_have_rates_by_rows(fakes: ModuleType, small: None) -> None:
    with fakes.FakeDevice(1, capability=AMPERE) as fake:
        rates = measuring.device_rates(fake.device, Gpu(AMPERE, 28))
    assert set(rates) == {"nf4", "nf4 together", "attention int8"}
    assert set(rates["nf4"]) == set(rates["nf4 together"]) == {1, 4}
    assert set(rates["attention int8"]) == {1, 16}
    assert all(rate > 0 for by_rows in rates.values() for rate in by_rows.values())


def test_what_lacks_its_kernel_is_not_measured_with_it(fakes: ModuleType, small: None) -> None:
    with fakes.FakeDevice(1, capability=AMPERE) as fake:
        rates = measuring.device_rates(fake.device, Gpu(AMPERE, 28, Lacks("no attention", "", "no experts")))
    assert set(rates) == {"nf4"}


def test_overheads_of_passes_are_measured_on_the_device(
    fakes: ModuleType, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    kinds = ((1, 4), (2, 4), (3, 8))
    monkeypatch.setattr(measuring, "PASS_KINDS", kinds)
    monkeypatch.setattr(measuring, "DECODED", 3)
    passes: list[Any] = []
    solve = measuring.solve_overheads
    monkeypatch.setattr(measuring, "solve_overheads", lambda shape, timed: passes.extend(timed) or solve(shape, timed))
    with fakes.FakeDevice(1, capability=WITHOUT_TENSOR_CORES) as fake:
        found = measuring.device_overheads(fake.device, Gpu(WITHOUT_TENSOR_CORES, 28, Lacks.everything("too old")))
        monkeypatch.setattr(measuring, "_MODEL_NBYTES", 1 << 10)
        assert measuring.device_overheads(fake.device, Gpu(WITHOUT_TENSOR_CORES, 28)) is None
    assert found is not None
    assert found.layer_s > 0 < found.schedule_s
    assert len(passes) == 2 * len(kinds)
    assert not any(one.streamed for one in passes)
    assert all(0 < one.outside_s < one.seconds for one in passes)
