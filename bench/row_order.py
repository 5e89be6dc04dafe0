"""What the order of a job's rows is worth to a mixture whose experts stream, in counts of reads: nothing is timed.

    python -m bench.make_real_mixture --experts 96 --per-token 64 --out models/cut96
    python -m bench.row_order --model models/cut96 --first 6 --texts /usr/share/vim/vim*/tutor/tutor.{de,fr,es}.utf-8

Rows that generate together share the experts that a pass reads. Rows of several kinds of real text (Python's help,
source code, and each of `--texts`) are routed token by token and run in groups of `--sequences`, in four orders:

`given`: the kinds in turn, as in a file that was shuffled. `kinds`: one kind after the other, the best that can be
known. `alike`: as jobs run them, by the tokens of prompts (runtime/jobs/order.py). `routing`: each next row's prompt
chose the experts most like the last one's.

Printed are the share of a layer's experts that a pass wants, and MB of them read a token with the most popular held
(moe/expert_cache.py); the model is the one of bench/routing.py, of which a token takes the first `--first` experts.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.make_real_mixture import code, prose
from bench.routing import BEFORE, Ids, cut_texts, popular, record
from moedge.offload.stream.stream import ShardKey
from moedge.runtime.jobs.order import alike, sketch
from support.experts.replay import replay

Floats = npt.NDArray[np.float64]


def chain(sketches: Floats) -> list[int]:
    """Rows [n] one after the other, each the most similar of those that are left to the one before; from the first."""
    similar = sketches @ sketches.T
    order, left = [0], np.ones(len(sketches), bool)
    left[0] = False
    while left.any():
        best = int(np.where(left, similar[order[-1]], -np.inf).argmax())
        order.append(best)
        left[best] = False
    return order


def bags(items: Ids, size: int) -> Floats:
    """How often each of `size` things is in a row of items [n, m], rare ones counting more, as vectors of length 1."""
    counts = np.stack([np.bincount(row, minlength=size) for row in items]).astype(np.float64)
    weighed = np.sqrt(counts) * np.log(len(items) / np.maximum(1, (counts > 0).sum(0)))
    return weighed / np.maximum(1e-9, np.linalg.norm(weighed, axis=1, keepdims=True))


def orders(texts: Ids, prefill: Ids, kinds: int, experts: int) -> Mapping[str, list[int]]:
    """Orders of rows whose prompts are `texts` [n, BEFORE] and chose `prefill` [L, n, BEFORE, A]; kinds take turns."""
    layers, count = prefill.shape[:2]
    chosen = (prefill + experts * np.arange(layers)[:, None, None, None]).transpose(1, 0, 2, 3).reshape(count, -1)
    sketches = np.stack([np.frombuffer(sketch(prompt), np.uint8) for prompt in texts.tolist()])
    return {
        "given": list(range(count)),
        "kinds": sorted(range(count), key=lambda row: row % kinds),
        "alike": alike(sketches, np.zeros(count, np.uint64)).tolist(),
        "routing": chain(bags(chosen, layers * experts)),
    }


def reads(ids: Ids, size: int, experts: int, share: float) -> tuple[float, float]:
    """The share of experts that passes of `size` rows want, and the experts read a token: ids [L, n, passes, A]."""
    layers, rows, passes, _ = ids.shape
    held = [ShardKey(layer, expert) for layer in range(layers) for expert in range(int(share * experts))]
    wanted: list[list[int]] = [
        np.unique(ids[layer, first : first + size, token]).tolist()
        for first in range(0, rows - size + 1, size)
        for token in range(passes)
        for layer in range(layers)
    ]
    total, tokens = sum(map(len, wanted)), len(wanted) // layers * size
    return total / len(wanted) / experts, (
        total - replay(wanted, layers, popular(held, layers, experts), held)
    ) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--texts", type=Path, nargs="*", default=[], help="files in UTF-8, each of another kind of text"
    )
    parser.add_argument("--rows", type=int, default=64, help="rows of each kind")
    parser.add_argument("--first", type=int, default=6, help="experts of a token")
    parser.add_argument("--held", type=float, default=0.5, help="the share of the experts that is held")
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 32, 64, 128])
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    kinds = [prose()[1], code()[1], *(path.read_text(encoding="utf-8") for path in options.texts)]
    rows = torch.stack([cut_texts(tokenizer, text, options.rows) for text in kinds], 1).flatten(0, 1)
    routed = record(model, rows, 0)[0, ..., : options.first]
    config = model.config
    nbytes = 3 * config.hidden_size * config.intermediate_size * 2
    experts = config.num_local_experts
    found = orders(rows[:, :BEFORE].numpy(), routed[:, :, :BEFORE], len(kinds), experts)
    print(f"{len(kinds)} kinds of {options.rows} rows, {options.first} of {experts} experts a token\n")
    print("| sequences | " + " | ".join(f"{name}: wanted | MB a token | of given" for name in found) + " |")
    print("|---" * (1 + 3 * len(found)) + "|")
    for size in options.sequences:
        cells, given = [], 0.0
        for order in found.values():
            wanted, read = reads(routed[:, order, BEFORE:], size, experts, options.held)
            given = given or read
            cells.append(f"{wanted:.1%} | {read * nbytes / 1e6:.3f} | {read / given:.3f}")
        print(f"| {size} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
