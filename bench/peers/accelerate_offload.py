"""Part of `qwen3`: transformers with accelerate's CPU offload under the same device budget, at its best batch."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from bench.gpu.random_model import write_config

# What activations, the cache and one layer in flight take of the budget, beside held layers; found by trying.
RESERVED_SHARE = 0.4
NEW_TOKENS = 6
BATCHES = (1, 4, 16, 32, 64, 128, 256)


def best_batch(budget: int, prompt: int, smaller: dict[str, int] | None = None) -> dict[str, Any]:
    """Tokens per second by batch, while there is memory and time; without a GPU of a model with `smaller` sizes."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / torch.cuda.get_device_properties(0).total_memory))
    begun, found = time.perf_counter(), {}
    with TemporaryDirectory() as folder:
        write_config(Path(folder), "qwen3", smaller or {})
        model = _offloaded(folder, budget, device)
        for batch in BATCHES if device.type == "cuda" else BATCHES[:2]:
            try:
                found[str(batch)] = _rates(model, batch, prompt, device)
            except torch.OutOfMemoryError:
                found[str(batch)] = {"out_of_memory": True}
                break
            if time.perf_counter() - begun > 300:
                break
    del model
    gc.collect()
    rates = {batch: each["generated_tok_s"] for batch, each in found.items() if "generated_tok_s" in each}
    if not rates:
        return {"by_batch": found}
    best = max(rates, key=rates.__getitem__)
    return {"best_batch": int(best), "generated_tok_s": rates[best], "by_batch": found}


def _offloaded(folder: str, budget: int, device: torch.device) -> Any:
    """Random weights in bfloat16, in host memory but for what `max_memory` leaves on the device."""
    from accelerate import cpu_offload, dispatch_model, infer_auto_device_map, init_empty_weights

    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    noise = torch.randn(1 << 24, dtype=torch.bfloat16).mul_(0.02)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(_filled(parameter, noise), requires_grad=False)
    model.eval()
    model.generation_config.eos_token_id = None
    if device.type == "cpu":
        return cpu_offload(model, execution_device=device)
    memory = {0: int(budget * (1 - RESERVED_SHARE)), "cpu": "96GiB"}
    plan = infer_auto_device_map(model, memory, no_split_module_classes=model._no_split_modules, dtype=torch.bfloat16)
    return dispatch_model(model, plan, main_device=0)


def _filled(parameter: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    value = torch.empty(parameter.shape, dtype=parameter.dtype)
    flat = value.view(-1)
    for begin in range(0, len(flat), len(noise)):
        part = flat[begin : begin + len(noise)]
        part.copy_(noise[: len(part)])
    return value.fill_(1) if parameter.dim() == 1 else value


@torch.inference_mode()
def _rates(model: Any, batch: int, prompt: int, device: torch.device) -> dict[str, float]:
    """The prompt's pass apart from the others: a run of one token is taken from one of several."""
    ids = torch.randint(5, model.config.vocab_size - 5, (batch, prompt), device=device)
    seconds = []
    for count in (1, 1 + NEW_TOKENS):
        begun = time.perf_counter()
        model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    steps = max(1e-9, seconds[1] - seconds[0])
    return {"prompt_tok_s": batch * prompt / seconds[0], "generated_tok_s": batch * NEW_TOKENS / steps}
