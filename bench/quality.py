"""What each weight format costs: perplexity of the demo model on text it never saw, against stock transformers.

python bench/quality.py            # prints the table of docs/quality.md
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moedge.runtime.load import load_engine
from moedge.runtime.model_source import open_source
from moedge.runtime.plan.planner import JobShape, Settings, make_plan
from moedge.runtime.scoring import perplexity

DEMO = Path(__file__).parents[1] / "examples" / "tiny_moe"
# Arithmetic, weights, --compute.
ROWS = [
    ("fp32", "none", "auto"),
    ("bf16", "none", "auto"),
    ("bf16", "int8", "auto"),
    ("bf16", "int8", "int8"),
    ("bf16", "int4", "auto"),
    ("bf16", "nf4", "auto"),
]


def stock_perplexity(folder: Path, token_ids: list[int], window: int) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses = []
    for begin in range(0, len(token_ids), window):
        ids = torch.tensor([token_ids[begin : begin + window]])
        with torch.inference_mode():
            logprobs = model(ids).logits[0, :-1].double().log_softmax(-1)
        losses.append(-logprobs.gather(1, ids[0, 1:, None]).squeeze(1))
    return math.exp(float(torch.cat(losses).mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO / "model")
    parser.add_argument("--text", type=Path, default=DEMO / "heldout.txt")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=20480)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    token_ids = tokenizer.encode(options.text.read_text(), add_special_tokens=False)[: options.tokens]
    stock = stock_perplexity(options.model, token_ids, options.window)
    print(f"{len(token_ids):,} tokens in windows of {options.window:,}\n")
    print("| arithmetic | weights | bytes of packed weights | perplexity | against transformers fp32 |")
    print("|---|---|---|---|---|")
    print(f"| fp32 | transformers | | {stock:.4f} | |")
    with open_source(str(options.model)) as source:
        for dtype, quant, compute in ROWS:
            job = JobShape(1, options.window)
            plan = make_plan(source.shape, Settings(dtype, quant, max_sequences=1, compute=compute), 8 << 30, job)
            loaded = load_engine(source, plan)
            ours = perplexity(loaded.engine, token_ids, options.window)
            packed = sum(loaded.shards.packed_nbytes().values())
            arithmetic = "int8 x int8" if compute == "int8" else dtype
            print(f"| {arithmetic} | {quant} | {packed:,} | {ours:.4f} | {ours / stock - 1:+.3%} |", flush=True)


if __name__ == "__main__":
    main()
