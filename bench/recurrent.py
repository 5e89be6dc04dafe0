"""What packed passes gain in models with recurrent layers: decode, prompts, and the time of the mixers.

    python -m bench.make_model --shape next --out models/next
    python -m bench.recurrent --model models/next [--ram 8GiB] [--sequences 32] [--transformers]

- decode: tokens/s of one sequence, of `--sequences` in one pass, and of as many in the same engine with mixers that are
  called for one sequence at a time, which read their projections for each. Beside it the mixers' share of the time.
- prompts: tokens/s of `--prompts` prompts of `--prompt` tokens in one pass; with `--transformers` also of its own model
  for comparison, which gets them as one batch of equal lengths.

Every figure is the best of `--repeats`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch

from moedge.runtime.engine.sequence import Batch, Sequence, TokenChunk
from moedge.runtime.loading.engine_loader import LoadedEngine, load_engine
from moedge.runtime.model.recurrent.pass_states import PassStates
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.source.model_source import open_source

# Tokens of the prompts that generated tokens follow.
SHORT = 32


@dataclass(slots=True)
class Timed:
    """Seconds of some passes, of their mixers among them, and what they generated or read."""

    tokens: int
    seconds: float
    mixers: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Mixers:
    """The recurrent mixers of a loaded model: their time, and a way to call them for one sequence at a time."""

    def __init__(self, loaded: LoadedEngine) -> None:
        assert loaded.model.states is not None, "the model has no recurrent layers"
        self.states: PassStates = loaded.model.states
        self.seconds, self.looped = 0.0, False
        self._batch: Batch | None = None
        self._own: list[list[Any]] = []
        self._watch_batches()
        for module in loaded.model.model.modules():
            if any(isinstance(child, torch.nn.Conv1d) for child in module.children()):
                module.forward = self._timed(module.forward)

    def _watch_batches(self) -> None:
        begin = self.states.begin

        def watched(batch: Batch, device: torch.device) -> None:
            self._own = []
            if self.looped:
                for chunk in batch.chunks:
                    begin(_alone(chunk, batch), device)
                    self._own.append([chunk, self.states._pieces, self.states._begun, self.states._turns])
            begin(batch, device)

        self.states.begin = watched  # type: ignore[method-assign]

    def _timed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def timed(hidden_states: torch.Tensor, **others: Any) -> Any:
            begun = time.perf_counter()
            out = self._loop(forward, hidden_states, **others) if self.looped else forward(hidden_states, **others)
            self.seconds += time.perf_counter() - begun
            return out

        return timed

    def _loop(self, forward: Callable[..., Any], hidden: torch.Tensor, **others: Any) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for chunk, pieces, begun, turns in self._own:
            self.states._pieces, self.states._begun, self.states._turns = pieces, begun, turns
            out[:, chunk.begin : chunk.end] = forward(hidden[:, chunk.begin : chunk.end], **others)
        return out


def _alone(chunk: TokenChunk, batch: Batch) -> Batch:
    return replace(batch, chunks=(replace(chunk, begin=0),))


def prompts_of(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(300, vocab, (count, length), generator=generator).tolist()


def decode(loaded: LoadedEngine, mixers: Mixers, count: int, passes: int, vocab: int) -> Timed:
    """`passes` passes that each give every one of `count` sequences a token."""
    for ids in prompts_of(count, SHORT, vocab, count):
        loaded.engine.add(Sequence(ids, SequenceSampling(passes + 4, ignore_eos=True)))
    scheduler = loaded.engine.scheduler
    while len(scheduler.running) < count or any(one.num_pending > 1 for one in scheduler.running):
        loaded.engine.step()
    # The first pass of another size is slower.
    loaded.engine.step()
    mixers.seconds, begun = 0.0, time.perf_counter()
    for _ in range(passes):
        loaded.engine.step()
    found = Timed(count * passes, time.perf_counter() - begun, mixers.seconds)
    list(loaded.engine.run())
    return found


def read(loaded: LoadedEngine, mixers: Mixers, prompts: list[list[int]]) -> Timed:
    """One pass over prompts."""
    for ids in prompts:
        loaded.engine.add(Sequence(ids, SequenceSampling(1, ignore_eos=True)))
    mixers.seconds, begun = 0.0, time.perf_counter()
    list(loaded.engine.run())
    return Timed(sum(map(len, prompts)), time.perf_counter() - begun, mixers.seconds)


def best(measure: Callable[[], Timed], repeats: int) -> Timed:
    return max((measure() for _ in range(repeats)), key=lambda timed: timed.rate)


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[tuple[LoadedEngine, int]]:
    longest = max(options.prompt + 1, SHORT + options.passes + 4)
    tokens = max(options.prompts * options.prompt, options.sequences * SHORT)
    settings = Settings(quant=options.quant, kv=options.kv, max_sequences=options.sequences, tokens_per_pass=tokens)
    with open_source(options.model) as source:
        budget = MemoryBudget(Budgets(ram=options.ram).host_nbytes())
        plan = make_plan(source.shape, settings, budget, Workload(options.sequences, longest))
        print(f"{plan.dtype}, weights {plan.quant}, KV cache {plan.kv}, {torch.get_num_threads()} threads")
        with closing(load_engine(source, plan)) as loaded:
            yield loaded, source.shape.vocab


def measure_ours(options: argparse.Namespace, prompts_out: list[list[int]]) -> list[tuple[str, Timed]]:
    with opened(options) as (loaded, vocab):
        mixers, count, repeats = Mixers(loaded), options.sequences, options.repeats
        prompts_out += prompts_of(options.prompts, options.prompt, vocab, 7)
        rows = [("decode, 1 sequence", best(lambda: decode(loaded, mixers, 1, options.passes, vocab), repeats))]
        packed = best(lambda: decode(loaded, mixers, count, options.passes, vocab), repeats)
        rows.append((f"decode, {count} sequences", packed))
        mixers.looped = True
        looped = best(lambda: decode(loaded, mixers, count, max(1, options.passes // 2), vocab), repeats)
        rows.append((f"decode, {count} sequences, mixers looped over them", looped))
        mixers.looped = False
        read_all = best(lambda: read(loaded, mixers, prompts_out), repeats)
        rows.append((f"prompts, {options.prompts} x {options.prompt}", read_all))
    return rows


@torch.inference_mode()
def measure_theirs(model_folder: str, prompts: list[list[int]], repeats: int) -> Timed:
    """transformers' model over the prompts as one batch, with a cache, as `generate` begins."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="auto").eval()
    ids = torch.tensor(prompts)

    def once() -> Timed:
        begun = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1)
        return Timed(ids.numel(), time.perf_counter() - begun, 0.0)

    return best(once, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--ram", default="8GiB")
    parser.add_argument("--quant", default="none")
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--passes", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--transformers", action="store_true", help="measure its prompts too")
    options = parser.parse_args()
    prompts: list[list[int]] = []
    rows = measure_ours(options, prompts)
    if options.transformers:
        rows.append(("prompts, transformers", measure_theirs(options.model, prompts, options.repeats)))
    print("| | tokens/s | ms | mixers |")
    print("|---|---|---|---|")
    for name, timed in rows:
        share = f"{timed.mixers / timed.seconds:.0%}" if timed.mixers else ""
        print(f"| {name} | {timed.rate:,.1f} | {1000 * timed.seconds:,.0f} | {share} |")
    rates = [timed.rate for _, timed in rows]
    print(f"packed / one sequence {rates[1] / rates[0]:.2f}, packed / looped {rates[1] / rates[2]:.2f}", end="")
    print(f", prompts / transformers' {rates[3] / rates[4]:.2f}" if options.transformers else "")


if __name__ == "__main__":
    main()
