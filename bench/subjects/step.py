"""What a pass costs outside the model: microseconds per token of scheduling, packing, sampling and committing.

    python -m bench.micro step
    python -m bench.micro step --sequences 512 --vocab 151936 --profile

The model is a fake whose logits are there already, so that a pass is nothing but the engine. Every sequence decodes one
token a pass, with a text that grows and a stop string to look for. A kind of row is `greedy`, `sampled` (temperature
and top-p), `penalised` (sampled, with a repetition penalty) or `mixed`, all of them in turn.

`sampling` is the share of the sampler, whose floor is a read of the logits: at 151,936 tokens a row has 0.6 MB.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import time
from collections.abc import Sequence as Items
from importlib.resources import as_file, files

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor

from moedge.offload.memory import return_memory
from moedge.runtime.engine.engine import Engine
from moedge.runtime.engine.scheduler import PassLimits, Scheduler
from moedge.runtime.engine.sequence import Batch, Sequence
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import KVPool
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.sampling.draw import Draw, Sampled
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.sampling.sampler import Sampler, TokenMasks
from moedge.runtime.shape.model_shape import KVGroup
from moedge.runtime.text.tokenizer import Tokenizer

PROMPT, BLOCK = 16, 32
KINDS = ("greedy", "sampled", "penalised", "mixed")


class FakeModel:
    """Logits that a language model could have: few likely tokens, one row shifted against the next."""

    def __init__(self, num_rows: int, vocab: int, num_texts: int) -> None:
        row = torch.randn(vocab, generator=torch.Generator().manual_seed(0)) * 2
        row[torch.randint(0, min(vocab, num_texts), (40,), generator=torch.Generator().manual_seed(1))] += 9
        self.logits = torch.stack([row.roll(index) for index in range(num_rows)])

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.logits[: len(batch.logit_rows)]


class TimedSampler(Sampler):
    """Notes what each pass's sampling takes, in seconds."""

    seconds: list[float]

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "seconds", [])

    def sample(self, logits: Tensor, draws: Items[Draw], masks: TokenMasks | None = None) -> Sampled:
        begun = time.perf_counter()
        samples = super().sample(logits, draws, masks)
        self.seconds.append(time.perf_counter() - begun)
        return samples


def params_of(kind: str, index: int, max_tokens: int) -> SequenceSampling:
    if kind == "mixed":
        kind = KINDS[index % 3]
    return SequenceSampling(
        max_tokens,
        temperature=0.0 if kind == "greedy" else 0.7,
        top_p=1.0 if kind == "greedy" else 0.9,
        repetition_penalty=1.1 if kind == "penalised" else 1.0,
        seed=index,
        stop=("\n\n",),
        ignore_eos=True,
    )


def make_engine(count: int, vocab: int, passes: int, kind: str, tokenizer: Tokenizer) -> Engine:
    spec = KVSpec(KVGroup((0,), 1, 8, None), "fp32", BLOCK)
    cache = KVCache([KVPool(spec, count * (2 + (PROMPT + passes) // BLOCK))])
    model = FakeModel(count, vocab, tokenizer.num_tokens)
    engine = Engine(model, Scheduler(PassLimits(PROMPT * count, count), cache), TimedSampler())
    for index in range(count):
        params = params_of(kind, index, passes + 1)
        text = tokenizer.stream(params.stop)
        engine.add(Sequence([index % 100, *range(PROMPT - 1)], params, text=text))
    engine.step()
    return engine


def measure(engine: Engine, passes: int) -> tuple[float, float]:
    """Medians of a pass in microseconds: whole, and sampling alone."""
    sampler = engine.sampler
    assert isinstance(sampler, TimedSampler)
    sampler.seconds.clear()
    times = []
    for _ in range(passes):
        begun = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6, statistics.median(sampler.seconds) * 1e6


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 151_936])
    parser.add_argument("--passes", type=int, default=12)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--profile", action="store_true", help="Print where Python's time goes.")


def run(options: argparse.Namespace) -> None:
    return_memory()
    print("| vocabulary | rows | us per token | of it sampling | the rest |\n|---|---|---|---|---|")
    with as_file(files("moedge.demo")) as bundle, Tokenizer.load(bundle / "model") as tokenizer:
        for vocab in options.vocab:
            for kind in options.kinds:
                engine = make_engine(options.sequences, vocab, options.passes, kind, tokenizer)
                if options.profile:
                    profiler = cProfile.Profile()
                    profiler.runcall(measure, engine, options.passes)
                    pstats.Stats(profiler).sort_stats("tottime").print_stats(22)
                    continue
                whole, sampling = (each / options.sequences for each in measure(engine, options.passes))
                print(f"| {vocab:,} | {kind} | {whole:.1f} | {sampling:.1f} | {whole - sampling:.1f} |", flush=True)
