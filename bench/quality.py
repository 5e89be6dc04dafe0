"""What each weight format costs: perplexity of the demo model on text it never saw, against stock transformers.

python bench/quality.py            # prints the table of docs/quality.md
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.settings.budgets import MemoryBudget
from moedge.runtime.settings.settings import Settings
from moedge.runtime.source.model_source import open_source
from support.heldout import asked, predict

# Arithmetic, weights, --compute.
ROWS = [
    ("fp32", "none", "auto"),
    ("bf16", "none", "auto"),
    ("bf16", "int8", "auto"),
    ("bf16", "int8", "int8"),
    ("bf16", "int4", "auto"),
    ("bf16", "nf4", "auto"),
]


def perplexity(logprobs: Iterable[torch.Tensor], windows: list[list[int]]) -> float:
    """exp of the mean negative log probability of every token of a window but its first; `logprobs` [n, V] a window."""
    scored = [
        predicted[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1))
        for predicted, ids in zip(logprobs, windows, strict=True)
    ]
    return math.exp(-float(torch.cat(scored).mean()))


def stock(folder: Path, windows: list[list[int]]) -> Iterator[torch.Tensor]:
    """What transformers predicts, window by window: fp64 [n, V]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for ids in windows:
        with torch.inference_mode():
            yield model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def main() -> None:
    folder, windows = asked(__doc__)
    wanted = perplexity(stock(folder, windows), windows)
    print("| arithmetic | weights | bytes of packed weights | perplexity | against transformers fp32 |")
    print("|---|---|---|---|---|")
    print(f"| fp32 | transformers | | {wanted:.4f} | |")
    with open_source(str(folder)) as source:
        for dtype, quant, compute in ROWS:
            job = Workload(1, max(map(len, windows)))
            plan = make_plan(
                source.shape,
                Settings(dtype=dtype, quant=quant, max_sequences=1, compute=compute),
                MemoryBudget(8 << 30),
                job,
            )
            loaded = load_engine(source, plan)
            ours = perplexity((torch.cat(list(predict(loaded.engine, ids))) for ids in windows), windows)
            packed = sum(loaded.shards.packed_nbytes().values())
            arithmetic = "int8 x int8" if compute == "int8" else dtype
            print(f"| {arithmetic} | {quant} | {packed:,} | {ours:.4f} | {ours / wanted - 1:+.3%} |", flush=True)


if __name__ == "__main__":
    main()
