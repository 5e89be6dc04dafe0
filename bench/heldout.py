"""How likely a model finds text that it never saw: what bench/quality.py and bench/kv_quality.py judge formats by."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer

from moedge.runtime.engine.batch import pack
from moedge.runtime.engine.engine import Engine
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.sampling.params import SamplingParams
from moedge.runtime.settings.errors import DoesNotFit

DEMO = Path(__file__).parents[1] / "examples" / "tiny_moe"


def asked(description: str | None) -> tuple[Path, list[list[int]]]:
    """What the command line asks for: a model's folder, and a text's tokens in windows that do not see each other."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO / "model")
    parser.add_argument("--text", type=Path, default=DEMO / "heldout.txt")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=20480)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    token_ids = tokenizer.encode(options.text.read_text(), add_special_tokens=False)[: options.tokens]
    print(f"{len(token_ids):,} tokens in windows of {options.window:,}\n")
    return options.model, [
        token_ids[begin : begin + options.window] for begin in range(0, len(token_ids), options.window)
    ]


def predict(engine: Engine, token_ids: list[int]) -> Iterator[torch.Tensor]:
    """Natural log probabilities of every token that could follow each of `token_ids`: fp64 [n, V], pass by pass.

    Runs through the engine's model and cache in passes of its own size; the engine must be idle.
    """
    scheduler, sequence = engine.scheduler, Sequence(token_ids, SamplingParams(1))
    try:
        while sequence.num_pending:
            count = min(sequence.num_pending, scheduler.limits.tokens_per_pass)
            if not scheduler.cache.grow(sequence.table, sequence.table.num_tokens + count):
                raise DoesNotFit(f"{len(token_ids)} tokens are more than the KV cache holds; score shorter texts")
            batch = replace(pack([(sequence, count)]), logit_rows=torch.arange(count))
            yield engine.model.forward(batch).double().log_softmax(-1)
            scheduler.cache.store(sequence.table, count)
    finally:
        scheduler.cache.release(sequence.table)
