"""Part `checks`: the device's own rates, and tokens of tiny models on one, two and three tiers."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu.report import Report
from bench.roofline import device_copy, link, pinning, products, widening
from moedge.moe.division import ExpertSeconds
from moedge.offload.device import find_device
from moedge.quant.kv.format import KVFormat
from moedge.runtime.loading.prepare import prepare
from moedge.runtime.plan.cpu_experts import host_nbytes
from moedge.runtime.settings.settings import Budgets
from moedge.runtime.source.model_source import open_source
from support.device import fake_device, host_kv, tiny_engine
from support.tiny_families import save_tiny

FAMILIES = (
    ("mixtral", "none"), ("qwen3_moe", "nf4"), ("gpt_oss", "int8"), ("llama", "none"),
    # Latents, and states of four kinds of recurrent layers.
    ("deepseek_v3", "none"), ("qwen3_next", "none"), ("granitemoehybrid", "none"), ("lfm2_moe", "none"),
    ("jamba", "none"), ("longcat_flash", "none"),
)  # fmt: skip
# With Triton's kernels: weight and KV formats, sinks and windows, no experts.
WITH_KERNELS = (
    ("mixtral", "none", "fp32"), ("qwen3_moe", "nf4", "int4"), ("gpt_oss", "int8", "int8"),
    ("mixtral", "nf4", "int8/int4"), ("gemma3_text", "none", "int8"), ("qwen3_moe", "int4+int3", "int8"),
    ("qwen3_moe", "int4+vq2", "int8"),
)  # fmt: skip
KERNELS = (8, 6)
# Two thirds of the missing experts, or all, are the CPU's.
ON_CPU = {"two thirds": ExpertSeconds(2.0, 1.0, 0.0, 0.0), "all": ExpertSeconds(1.0, 0.0, 0.0, 0.0)}
# Blocks for so many sequences on the device, and cohorts with room for so many each.
HOSTED = {"half": (3, 2, 2), "all but one": (1, 3, 2)}


def run_checks(report: Report, fake: bool) -> None:
    if not fake:
        for step in (link, pinning, device_copy, products, widening):
            report.step("checks", step.__name__, step)
    for family, quant in FAMILIES:
        report.step("checks", f"{family} {quant}", partial(_tiers, family, quant, fake))
    for family, quant, kv in WITH_KERNELS:
        report.step("checks", f"kernels, {family} {quant} {kv}", partial(_kernels, family, quant, kv, fake))
    run_beside(report, fake)


def run_beside(report: Report, fake: bool) -> None:
    """What the CPU and its memory do beside a device."""
    for family, quant in (("qwen3_moe", "int4"), ("mixtral", "none"), ("gpt_oss", "mxfp4")):
        report.step("checks", f"experts on the CPU, {family} {quant}", partial(_experts_on_cpu, family, quant, fake))
    for family, kv in (("qwen3_moe", "int8"), ("gpt_oss", "fp32"), ("gemma3_text", "int4"), ("deepseek_v3", "fp32")):
        report.step("checks", f"sequences in host memory, {family} {kv}", partial(_in_host_memory, family, kv, fake))


def _tiers(family: str, quant: str, fake: bool) -> dict[str, Any]:
    """Tokens with everything resident, half and least of it, three tiers, nothing pinned.

    In fp32 and deterministic, so that all must be equal, and equal to those of stock transformers where weights are
    not quantized.
    """
    results: dict[str, Any] = {}
    with tiny_case(family, quant) as (case, stock):
        wanted = None
        for name, pin, number in _ways():
            with device_for_run(fake, pin, number) as device:
                plan = case.three_tiers(device) if name == "three tiers" else case.plan(device, _SHARES[name])
                ran = case.run(plan, device)
                wanted = wanted or ran.tokens
                results[name] = _compare(name, ran, plan, wanted, device)
        if quant == "none":
            results["transformers"] = _against_stock(stock, case.prompts, wanted, fake)
    return {"moved": results}


def _kernels(family: str, quant: str, kv: str, fake: bool) -> dict[str, Any]:
    """Triton's attention and grouped experts, half streamed, over a KV format: the processor's tokens with torch's."""
    with tiny_case(family, quant) as (case, _), device_for_run(fake, True, 0, KERNELS) as device:
        case = replace(case, settings=replace(case.settings, kv=kv))
        if fake:
            # The interpreter takes its time.
            case = replace(case, lengths=(3, 20), new_tokens=3)
        plan = case.plan(device, 0.5)
        if plan.attention != "triton":
            return {"skipped": f"attention is {plan.attention}'s on this device"}
        ran, wanted = case.run(plan, device), case.run(case.plan(None)).tokens
        _compare(f"{family} {quant} {kv}", ran, plan, wanted, device)
        return {"attention": plan.attention, "grouped_products": plan.grouped_products, "to_device": ran.to_device}


def _experts_on_cpu(family: str, quant: str, fake: bool) -> dict[str, Any]:
    """Half of the experts held; the CPU computes some of the others, or all: tokens as if it computed none."""
    results: dict[str, Any] = {}
    with tiny_case(family, quant) as (case, _):
        wanted = case.run(case.plan(None)).tokens
        for name, seconds in ON_CPU.items():
            with device_for_run(fake, True, 0) as device:
                nbytes = host_nbytes(case.source.shape, "fp32")
                plan = case.held(device, 0.5, on_disk=False)
                ran = case.run(replace(plan, cpu_experts=seconds, cpu_experts_nbytes=nbytes), device, stream=None)
            if ran.tokens != wanted:
                raise AssertionError(f"{name}: other tokens than the processor's")
            results[name] = ran.by_host[0].experts
            if not results[name]:
                raise AssertionError(f"{name}: the CPU computed nothing")
    return {"experts": results}


def _in_host_memory(family: str, kv: str, fake: bool) -> dict[str, Any]:
    """Half of six sequences, or all but one, in host memory; cohorts cross the link, or the CPU attends to them."""
    results: dict[str, Any] = {}
    with tiny_case(family, "none") as (case, _):
        case = host_kv.many(case, kv)
        wanted = host_kv.run(case, host_kv.hosted(case, case.plan(None), 6)).tokens
        for (name, where), here in itertools.product(HOSTED.items(), (False, True)):
            if here and family == "deepseek_v3":
                continue
            with device_for_run(fake, True, 0) as device:
                plan = host_kv.hosted(case, case.plan(device, 0.0), *where, here=here)
                ran = host_kv.run(case, plan, device)
            if ran.tokens != wanted:
                raise AssertionError(f"{name}, attended to {'there' if here else 'here'}: other tokens")
            if not ran.written or (here and not ran.attended):
                raise AssertionError(f"{name}: nothing went to host memory")
            results[f"{name}{', by the CPU' if here else ''}"] = f"{ran.read} B read {ran.attended} attended"
    return {"moved": results}


@contextmanager
def tiny_case(family: str, quant: str) -> Iterator[tuple[Any, Any]]:
    """A tiny random checkpoint of a family with its store, and transformers' own model of it."""
    with tempfile.TemporaryDirectory() as folder:
        stock = save_tiny(family, Path(folder, "model"))
        with open_source(f"{folder}/model") as source:
            importance = tiny_engine.importance_for(quant)
            prepare(source, Path(folder, "store"), quant, "fp32", Budgets().on_cpu(), importance=importance)
            case = tiny_engine.Case(source, Path(folder, "store"), tiny_engine.exact(quant))
            yield case, stock


_SHARES = {"resident": 1.0, "half": 0.6, "least": 0.0, "unpinned": 0.0}


def _ways() -> list[tuple[str, bool, int]]:
    names = ("resident", "half", "least", "three tiers", "unpinned")
    return [(name, name != "unpinned", number) for number, name in enumerate(names)]


def _compare(name: str, ran: Any, plan: Any, wanted: Any, device: Any) -> str:
    streamed = plan.weights_nbytes - plan.held_nbytes
    if ran.tokens != wanted:
        raise AssertionError(f"{name}: tokens differ from those with everything resident")
    # The offsets of quantized keys take a pass of their own, which stores keep.
    measured = not plan.streams and KVFormat.parse(plan.kv).keys.quantized
    if (ran.to_device, ran.from_disk) != ((ran.passes + measured) * streamed, ran.passes * plan.staging.disk_nbytes):
        raise AssertionError(f"{name}: {ran.to_device} and {ran.from_disk} bytes moved, wanted {streamed} a pass")
    if device.peak > plan.budget.device.nbytes:
        raise AssertionError(f"{name}: the device's peak {device.peak} is over {plan.budget.device.nbytes}")
    return f"{ran.to_device} B to device {ran.from_disk} B from disk"


def _against_stock(stock: Any, prompts: list[list[int]], wanted: Any, fake: bool) -> str:
    """Greedy tokens of transformers' own model on the same device, one prompt at a time."""
    stock = stock if fake else stock.cuda()
    stock.generation_config.eos_token_id = None
    for prompt, tokens in zip(prompts, wanted, strict=True):
        ids = torch.tensor([prompt], device=stock.device)
        out = stock.generate(ids, max_new_tokens=len(tokens), do_sample=False, pad_token_id=0)
        if (found := out[0, len(prompt) :].tolist()) != tokens:
            raise AssertionError(f"transformers gives {found}, moedge {tokens}")
    return "tokens equal"


class device_for_run:
    """A device for one run: the machine's, or a fake one with a schedule of its own; `pin` may be refused.

    A fake one is of `capability`; kernels take their time there, so the default is one that has none.
    """

    def __init__(self, fake: bool, pin: bool, number: int, capability: tuple[int, int] = (7, 0)) -> None:
        pin_limit = float("inf") if pin else 0
        self._fake = fake_device.FakeDevice(number, pin_limit=pin_limit, capability=capability) if fake else None
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
