"""What continuous batching gains: static, request-level and continuous batching of the same rows through one engine.

    python -m bench.batching [--model MODEL] [--ram 2GiB] [--rows 128] [--sequences 32]

Prompt and answer lengths are lognormal, as those of real requests are. All three run passes of the same engine; only
what is added to it when differs:

- static: batches of `--sequences`; prompts padded to the batch's longest, answers generated to the batch's longest.
- request-level: batches too, but a finished sequence stops computing; its place stays empty until the batch is done.
- continuous: a finished sequence's place goes to the next row at once (Orca, OSDI 2022).

A token counts once a row asked for it. Beside seconds stand passes: where a pass takes as long as the weights need to
arrive, whatever the number of sequences, they are the time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch

from moedge.runtime.engine.engine import Engine
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.source.model_source import open_source

DEMO = Path(__file__).parents[1] / "examples" / "tiny_moe" / "model"
# Of the logarithm; answers of chats spread about as much (ShareGPT: 0.9 to 1.1).
SIGMA = 0.9
LONGEST = 256
POLICIES = ("static", "request-level", "continuous")


@dataclass(frozen=True, slots=True)
class Row:
    prompt: int
    answer: int


@dataclass(slots=True)
class Outcome:
    """Tokens that a row asked for, pass by pass; tokens computed in all; seconds of each repeat."""

    useful: list[int] = field(default_factory=list)
    computed: int = 0
    seconds: list[float] = field(default_factory=list)


def make_rows(count: int, mean_prompt: float, mean_answer: float) -> list[Row]:
    generator = torch.Generator().manual_seed(11)

    def lengths(mean: float) -> list[int]:
        # The mean of a lognormal is exp(mu + sigma^2 / 2).
        values = torch.empty(count).log_normal_(
            float(torch.tensor(mean).log()) - SIGMA**2 / 2, SIGMA, generator=generator
        )
        return values.round().clamp(1, LONGEST).int().tolist()

    return [Row(*pair) for pair in zip(lengths(mean_prompt), lengths(mean_answer), strict=True)]


def batches(policy: str, rows: list[Row], size: int) -> Iterator[list[tuple[Row, Row]]]:
    """Runs of (what is computed, what was asked for) that are added together once the engine is idle."""
    if policy == "continuous":
        yield [(row, row) for row in rows]
        return
    for begin in range(0, len(rows), size):
        batch = rows[begin : begin + size]
        longest = Row(max(row.prompt for row in batch), max(row.answer for row in batch))
        yield [(longest if policy == "static" else row, row) for row in batch]


def run(engine: Engine, policy: str, rows: list[Row], size: int, outcome: Outcome) -> None:
    generator = torch.Generator().manual_seed(5)
    outcome.useful, outcome.computed = [], 0
    begun = time.perf_counter()
    for batch in batches(policy, rows, size):
        sequences = []
        for computed, row in batch:
            prompt = torch.randint(300, 900, (computed.prompt,), generator=generator).tolist()
            sequence = Sequence(prompt, SequenceSampling(computed.answer, ignore_eos=True))
            sequences.append((sequence, row))
            engine.add(sequence)
            outcome.computed += computed.prompt + computed.answer - 1
        before = 0
        while engine.busy:
            engine.step()
            useful = sum(min(len(sequence.output_ids), row.answer) for sequence, row in sequences)
            outcome.useful.append(useful - before)
            before = useful
    outcome.seconds.append(time.perf_counter() - begun)


def print_table(outcomes: dict[str, Outcome], rows: list[Row]) -> None:
    asked = sum(row.prompt + row.answer - 1 for row in rows)
    answers = sum(row.answer for row in rows)
    base = outcomes["static"]
    print(
        "| batching | passes | answer tokens a pass | computed tokens that were asked for | tok/s | time, static = 1 |"
    )
    print("|---|---|---|---|---|---|")
    for policy, outcome in outcomes.items():
        seconds, passes = statistics.median(outcome.seconds), len(outcome.useful)
        cells = (
            policy, f"{passes:,}", f"{answers / passes:.1f}", f"{asked / outcome.computed:.0%}",
            f"{answers / seconds:,.0f}", f"{seconds / statistics.median(base.seconds):.2f}",
        )  # fmt: skip
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--prompt", type=float, default=32, help="mean tokens of a prompt")
    parser.add_argument("--answer", type=float, default=32, help="mean tokens of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ram", default="2GiB")
    options = parser.parse_args()
    rows = make_rows(options.rows, options.prompt, options.answer)
    outcomes = {policy: Outcome() for policy in POLICIES}
    with open_source(options.model) as source:
        settings = Settings(max_sequences=options.sequences, tokens_per_pass=512)
        host_nbytes = Budgets(ram=options.ram).host_nbytes()
        plan = make_plan(source.shape, settings, MemoryBudget(host_nbytes), Workload(options.sequences, 2 * LONGEST))
        with closing(load_engine(source, plan)) as loaded:
            for _ in range(options.repeats):
                for policy, outcome in outcomes.items():
                    run(loaded.engine, policy, rows, options.sequences, outcome)
    print_table(outcomes, rows)


if __name__ == "__main__":
    main()
