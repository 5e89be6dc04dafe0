"""Part `checks`: the device's own rates, and tokens of tiny models on one, two and three tiers."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import rates
import torch
from report import Report

from moedge.offload.device import find_device
from moedge.runtime.model_source import open_source
from moedge.runtime.plan.budgets import Budgets
from moedge.runtime.weights.making import prepare

TESTS = Path(__file__).parents[2] / "tests"
FAMILIES = (("mixtral", "none"), ("qwen3_moe", "nf4"), ("gpt_oss", "int8"), ("llama", "none"))
REPEATS = 20


def run_checks(report: Report, fake: bool) -> None:
    if not fake:
        for step in (rates.link, rates.pinning, rates.device_copy, rates.products, rates.widening):
            report.step("checks", step.__name__, step)
    for family, quant in FAMILIES:
        report.step("checks", f"{family} {quant}", partial(_tiers, family, quant, fake))


def _tiers(family: str, quant: str, fake: bool) -> dict[str, Any]:
    """Tokens with everything resident, half and least of it, three tiers, nothing pinned; then the least, many times.

    In fp32 and deterministic, so that all must be equal, and equal to those of stock transformers where weights are
    not quantized.
    """
    models, tiny = _load("models_of_tests", TESTS / "conftest.py"), _load("tiny_engine")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        stock = models.build_model(family)
        stock.save_pretrained(f"{folder}/model")
        models.build_tokenizer(Path(folder, "model"), stock.config.vocab_size)
        with open_source(f"{folder}/model") as source:
            prepare(source, Path(folder, "store"), quant, "fp32", Budgets())
            case = tiny.Case(source, Path(folder, "store"), tiny.exact(quant))
            wanted = None
            for name, pin, number in _ways():
                with device_for_run(fake, pin, number) as device:
                    plan = case.three_tiers(device) if name == "three tiers" else case.plan(device, _SHARES[name])
                    ran = case.run(plan, device)
                    wanted = wanted or ran.tokens
                    results[name] = _compare(name, ran, plan, wanted, device)
            results["races"] = _repeat(case, fake, wanted)
        if quant == "none":
            results["transformers"] = _against_stock(stock, tiny, wanted, fake)
    return {"moved": results}


_SHARES = {"resident": 1.0, "half": 0.6, "least": 0.0, "unpinned": 0.0}


def _ways() -> list[tuple[str, bool, int]]:
    names = ("resident", "half", "least", "three tiers", "unpinned")
    return [(name, name != "unpinned", number) for number, name in enumerate(names)]


def _compare(name: str, ran: Any, plan: Any, wanted: Any, device: Any) -> str:
    streamed = plan.weights_nbytes - plan.held_nbytes
    if ran.tokens != wanted:
        raise AssertionError(f"{name}: tokens differ from those with everything resident")
    if (ran.to_device, ran.from_disk) != (ran.passes * streamed, ran.passes * plan.device.disk_nbytes):
        raise AssertionError(f"{name}: {ran.to_device} and {ran.from_disk} bytes moved, wanted {streamed} a pass")
    if device.peak > plan.device.budget_nbytes:
        raise AssertionError(f"{name}: the device's peak {device.peak} is over {plan.device.budget_nbytes}")
    return f"{ran.to_device} B to device {ran.from_disk} B from disk"


def _repeat(case: Any, fake: bool, wanted: Any) -> str:
    """The least that is held, again and again, behind compute that holds the stream up for random times."""
    for number in range(REPEATS if not fake else 3):
        with device_for_run(fake, True, number) as device:
            if not fake:
                torch.cuda._sleep(1_000_000 * (number % 5))
            if case.run(case.plan(device, 0.0), device).tokens != wanted:
                raise AssertionError(f"run {number} of the least that is held gave other tokens: a race")
    return f"{REPEATS if not fake else 3} runs alike"


def _against_stock(stock: Any, tiny: ModuleType, wanted: Any, fake: bool) -> str:
    """Greedy tokens of transformers' own model on the same device, one prompt at a time."""
    stock = stock if fake else stock.cuda()
    stock.generation_config.eos_token_id = None
    for prompt, tokens in zip(tiny.prompts(), wanted, strict=True):
        ids = torch.tensor([prompt], device=stock.device)
        out = stock.generate(ids, max_new_tokens=len(tokens), do_sample=False, pad_token_id=0)
        if (found := out[0, len(prompt) :].tolist()) != tokens:
            raise AssertionError(f"transformers gives {found}, moedge {tokens}")
    return "tokens equal"


class device_for_run:
    """A device for one run: the machine's, or a fake one with a schedule of its own; `pin` may be refused."""

    def __init__(self, fake: bool, pin: bool, number: int) -> None:
        self._fake = _load("fake_device").FakeDevice(number, pin_limit=float("inf") if pin else 0) if fake else None
        self._pin = pin

    def __enter__(self) -> Any:
        if self._fake is not None:
            self._fake.__enter__()
            return self._fake.device
        device = find_device()
        assert device is not None
        device.limit(device.total)
        if not self._pin:
            device.cuda = _Unpinned()
        return device

    def __exit__(self, *error: Any) -> None:
        if self._fake is not None:
            self._fake.__exit__(*error)


class _Unpinned:
    """torch.cuda, of a machine that pins nothing."""

    def cudart(self) -> _Unpinned:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        return 2

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


def _load(name: str, path: Path | None = None) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path or TESTS / "device" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
