"""One family, whole: its tiny checkpoint streamed at the smallest budget, and packed, against transformers' tokens."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.loading.prepare import prepare
from moedge.runtime.model.text_class import text_class
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import budget_range, make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.source.model_source import open_source
from support.tiny_families import save_tiny
from support.tiny_wrappers import save_multimodal, whole_model

LENGTHS = (3, 40, 17, 70, 1, 33)
NEW_TOKENS = 16
# Of twelve sequences.
AT_ONCE = 3


@dataclass(frozen=True, slots=True)
class FamilyRun:
    """Tokens by transformers, ours streamed, ours packed, and those of every prompt twice with `three` sequences at a
    time; and what shows that streaming, packing and waiting happened.
    """

    expected: list[list[int]]
    streamed: list[list[int]]
    packed: list[list[int]]
    three: list[list[int]]
    nbytes_streamed: int
    streamed_passes: int
    packed_passes: int
    most_at_once: int

    @property
    def failure(self) -> str:
        """Empty where all is as it should be."""
        if self.nbytes_streamed == 0 or self.streamed_passes <= self.packed_passes:
            return f"{self.nbytes_streamed} bytes streamed, {self.streamed_passes} and {self.packed_passes} passes"
        if len({token for row in self.expected for token in row}) <= 20:
            return "transformers' tokens are degenerate, so equality shows nothing"
        if self.most_at_once != AT_ONCE:
            return f"{self.most_at_once} sequences ran at once, {AT_ONCE} were to"
        ways = {"streamed": (self.streamed, 1), "packed": (self.packed, 1), "three at a time": (self.three, 2)}
        for what, (found, times) in ways.items():
            expected = self.expected * times
            wrong = [i for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)) if ours != theirs]
            if wrong:
                return f"{what}: tokens of {len(wrong)} of {len(expected)} rows differ from transformers'"
        return ""


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(5, 380, (length,), generator=generator).tolist() for length in LENGTHS]


def run_family(family: str, folder: Path) -> FamilyRun:
    """Raises what refuses the family. Of one that transformers has only in whole models, one of these is the oracle."""
    if (whole := whole_model(family)) is not None:
        return run_checkpoint(folder, tokens_of(save_multimodal(whole, folder / "checkpoint", family)))
    save_tiny(family, folder / "checkpoint")
    return run_checkpoint(folder, stock_tokens(folder / "checkpoint"))


def run_checkpoint(folder: Path, expected: list[list[int]], name: str = "checkpoint") -> FamilyRun:
    """Runs the checkpoint of that name in the folder, of which transformers' tokens are `expected`."""
    job = Workload(len(LENGTHS), max(LENGTHS) + NEW_TOKENS)
    settings = Settings(dtype="fp32", quant="none", kv="fp32", tokens_per_pass=48, max_sequences=8, deterministic=True)
    with open_source(str(folder / name)) as source:
        smallest, whole = budget_range(source.shape, settings, job)
        prepare(source, folder / "store", "none", "fp32", Budgets().on_cpu())
        streamed = _run(source, make_plan(source.shape, settings, MemoryBudget(smallest), job), folder / "store")
        packed = _run(source, make_plan(source.shape, settings, MemoryBudget(2 * whole), job), None)
        few = make_plan(source.shape, replace(settings, max_sequences=AT_ONCE), MemoryBudget(2 * whole), job)
        three = _run(source, few, None, 2)
    return FamilyRun(expected, streamed[0], packed[0], three[0], streamed[1], streamed[2], packed[2], three[3])


def stock_tokens(folder: Path) -> list[list[int]]:
    """transformers' own greedy tokens, one prompt at a time, by the attention that defines the model.

    Others leave features out: in older releases `sdpa` does not bound scores.
    """
    from transformers import AutoConfig

    stock = text_class(type(AutoConfig.from_pretrained(folder)))
    return tokens_of(stock.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval())


def tokens_of(model: Any) -> list[list[int]]:
    """A stock model's greedy tokens after each prompt."""
    return [_generate(model, ids) for ids in prompts()]


def _generate(model: Any, ids: list[int]) -> list[int]:
    out = model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return list(out[0, len(ids) :].tolist())


def _run(source: Any, plan: Plan, store: Path | None, times: int = 1) -> tuple[list[list[int]], int, int, int]:
    """Tokens of every prompt, so many times; bytes from the disk, passes, and the most sequences in one of them."""
    loaded = load_engine(source, plan, store)
    sequences = [Sequence(ids, SequenceSampling(NEW_TOKENS), frozenset({2})) for ids in prompts() * times]
    try:
        for sequence in sequences:
            loaded.engine.add(sequence)
        passes = most = 0
        while loaded.engine.busy:
            loaded.engine.step()
            passes, most = passes + 1, max(most, len(loaded.engine.scheduler.running))
        nbytes = loaded.streamed.nbytes_from_disk
    finally:
        loaded.close()
    return [sequence.output_ids for sequence in sequences], nbytes, passes, most
