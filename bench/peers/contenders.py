"""The contenders of bench/compare.py: each loads a model once and is timed on the same rows, phase by phase.

    python -m bench.peers.contenders '{"contender": "transformers", "model": ..., "setting": "eager", ...}'

One process per contender and setting, so that nobody inherits another's memory or threads. Prints a JSON line per run:
tokens per second of the prompt and of decoding, peak memory of the process, and the share of the machine's CPU time
that others used.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moedge.offload.machine.bystanders import Bystanders

if TYPE_CHECKING:
    from torch import Tensor

    from moedge.runtime.plan.placement import Plan
    from moedge.runtime.sampling.draw import Draw, Sampled
    from moedge.runtime.sampling.sampler import Sampler, TokenMasks
    from moedge.runtime.source.model_source import ModelSource

# How each waits for its threads is its own affair; moedge's choice is the one its command line makes.
if __name__ == "__main__" and json.loads(sys.argv[1])["contender"] in ("moedge", "prepare"):
    from moedge.computing import settle
    from moedge.offload.memory import return_memory

    settle()
    return_memory()


# Of moedge's passes, the best of 512 to 8,192 on the machine of docs/dev/performance.md, where all weights are held.
PASS_TOKENS = 4096
# Where they stream, what a pass takes is taken from experts that could be held; jobs plan 64 to 512 tokens there.
STREAMED_PASS_TOKENS = 256
# The cell whose figure is tokens of prompts per second; in all others generated tokens count.
PROMPTS = "prompts"
# Tokens of a block of moedge's KV cache.
KV_BLOCK = 32


class Load(NamedTuple):
    """A cell of the table: `sequences` of `prompt` random tokens each generate `new`; it is timed `repeats` times."""

    sequences: int
    prompt: int
    new: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Task:
    """The fields of each load by the name of its cell. `setting` is the contender's own.

    `ram` is what the contender is told to stay within. `python` is the interpreter that runs it. `scratch` is a folder
    for stores of packed weights and what accelerate writes; whoever is killed leaves it behind. With `rates` the
    machine's are measured before each timing.
    """

    contender: str
    model: str
    setting: str
    loads: dict[str, list[int]]
    threads: int
    ram: str
    binaries: str = ""
    python: str = ""
    scratch: str = "scratch"
    rates: bool = False

    def __post_init__(self) -> None:
        for load in self.cells.values():
            if load.new < 2:
                raise ValueError(f"new is {load.new}; the first token ends the prompt, so 2 are the fewest that decode")

    @property
    def cells(self) -> dict[str, Load]:
        return {name: Load(*fields) for name, fields in self.loads.items()}

    @property
    def most(self) -> int:
        return max(load.sequences for load in self.cells.values())

    def prompts(self, load: Load) -> list[list[int]]:
        import torch

        generator = torch.Generator().manual_seed(load.sequences)
        vocabulary = int(json.loads((Path(self.model) / "config.json").read_text())["vocab_size"])
        # Past the first few, which tokenizers give to control tokens.
        size = (load.sequences, load.prompt)
        return torch.randint(min(300, vocabulary // 2), vocabulary, size, generator=generator).tolist()


@dataclass(frozen=True, slots=True)
class Timing:
    """One repeat. `experts` is the share of a layer's experts that a pass wanted, where that is counted."""

    batch: int
    prompt_tok_s: float
    decode_tok_s: float
    peak_gib: float
    others: float
    cell: str = ""
    read_bytes_s: float = 0.0
    flop_s: float = 0.0
    experts: float | None = None


class Ran(NamedTuple):
    """Seconds of the prompts and of the `new - 1` passes after them, and the experts that passes of each wanted."""

    prompt_s: float
    decode_s: float
    decode_experts: float | None = None
    prompt_experts: float | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """The folder whose weights moedge will read."""

    reads: str


def repeated(task: Task, run: Callable[[Load], Ran]) -> Iterator[Timing]:
    """Times `run(load)` after a run of the first load that is not counted."""
    run(next(iter(task.cells.values())))
    for cell, load in task.cells.items():
        for _ in range(load.repeats):
            rates = measured_rates(task)
            bystanders = Bystanders()
            ran = run(load)
            yield Timing(
                load.sequences,
                load.sequences * load.prompt / ran.prompt_s,
                load.sequences * (load.new - 1) / ran.decode_s,
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                bystanders.share(),
                cell,
                **rates,
                experts=ran.prompt_experts if cell == PROMPTS else ran.decode_experts,
            )


def measured_rates(task: Task) -> dict[str, float]:
    """Right before a timing, since those of a virtual machine change from minute to minute."""
    if not task.rates:
        return {}
    import torch

    from bench.peers.rates import measure

    torch.set_num_threads(task.threads)
    return asdict(measure())


def longest(task: Task) -> int:
    """Tokens of each of the most sequences, such that the KV cache's blocks are enough for every load."""
    blocks = [load.sequences * -(-(load.prompt + load.new) // KV_BLOCK) for load in task.cells.values()]
    return -(-max(blocks) // task.most) * KV_BLOCK


def formats_of(setting: str) -> tuple[str, str]:
    """The format of the weights, `int4` or with routed experts of its own `int4+int3`, and what computes, which may
    follow: `int4+int8`, `int4+int3+int8`."""
    quant, _, compute = setting.rpartition("+")
    return (quant, compute) if compute in ("int8", "float") and quant else (setting, "float")


@contextmanager
def planned(task: Task) -> Iterator[tuple[ModelSource, Plan, Path | None]]:
    """The checkpoint, the plan within `ram`, and the store to stream from, made where it is missing."""
    import torch

    from moedge.runtime.loading.prepare import store_for
    from moedge.runtime.plan.placement import Workload
    from moedge.runtime.plan.planner import make_plan
    from moedge.runtime.settings.errors import DoesNotFit
    from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
    from moedge.runtime.source.model_source import open_source

    torch.set_num_threads(task.threads)
    quant, compute = formats_of(task.setting)
    budgets = Budgets(ram=task.ram, disk_dir=Path(task.scratch))
    with open_source(task.model) as source:
        most = task.most
        tokens = max(most, min(PASS_TOKENS, max(load.sequences * load.prompt for load in task.cells.values())))
        settings = Settings(dtype="auto", quant=quant, max_sequences=most, compute=compute)
        budget, workload = MemoryBudget(budgets.host_nbytes()), Workload(most, longest(task))

        def planned_for(tokens: int) -> Plan:
            return make_plan(source.shape, replace(settings, tokens_per_pass=tokens), budget, workload)

        streamed = min(tokens, max(most, STREAMED_PASS_TOKENS))
        try:
            plan = planned_for(tokens)
        except DoesNotFit:
            plan = planned_for(streamed)
        if plan.streams and PROMPTS not in task.cells:
            # The smallest in which all sequences decode together.
            while (plan := planned_for(streamed)).kv_sequences < most:
                streamed *= 2
        store = store_for(source, plan, budgets)
        yield source, plan, store and store.folder


def prepare(task: Task) -> Iterator[Prepared]:
    """Makes the store that moedge will stream from, in a process that ends: what it read and took is not the run's."""
    with planned(task) as (source, _, store):
        yield Prepared(str(store or source.folder))


class RandomTokens:
    """A sampler whose tokens are drawn as ever, and then replaced by random ones.

    llama-batched-bench goes on from random tokens, too. Greedy ones of random weights repeat themselves: nine tenths of
    the experts of one sequence are those of the token before, so that hardly any would be read.
    """

    def __init__(self, sampler: Sampler, vocab: int) -> None:
        import numpy

        self._sampler, self._vocab, self._random = sampler, vocab, numpy.random.default_rng(0)

    def sample(self, logits: Tensor, draws: list[Draw], masks: TokenMasks | None = None) -> Sampled:
        sampled = self._sampler.sample(logits, draws, masks)
        return replace(sampled, token_ids=self._random.integers(self._vocab, size=len(draws)))


def run_moedge(task: Task) -> Iterator[Timing]:
    from moedge.runtime.settings.stages import importing

    # As a job does: the collector would traverse what is imported again and again, an hundredth of all passes.
    with importing("torch"):
        from moedge.runtime.engine.sequence import Sequence
        from moedge.runtime.jobs.lifecycle import profile_engine, prompt_tokens
        from moedge.runtime.loading.engine_loader import load_engine
        from moedge.runtime.plan.placement import Workload
        from moedge.runtime.sampling.params import SequenceSampling

    with planned(task) as (source, plan, store), closing(load_engine(source, plan, store)) as loaded:
        engine = loaded.engine
        # As a job begins: experts are held in the memory that the largest pass leaves.
        profile_engine(loaded, plan, Workload(task.most, longest(task)), prompt_tokens([], source.shape.vocab))
        # Repeated prompts would be found in the cache, and their tokens not be computed.
        engine.scheduler.cache.sharing = False
        going_on: Any = RandomTokens(engine.sampler, source.shape.vocab)
        engine.sampler = going_on

        popularity = loaded.streamed.experts.stats

        def run(load: Load) -> Ran:
            batch = load.sequences
            for prompt in task.prompts(load):
                engine.add(Sequence(prompt, SequenceSampling(load.new, ignore_eos=True)))
            popularity.start_counting()
            wanted = None
            begun = time.perf_counter()
            # Sequences that decode while the last prompts are computed are not counted, though they work.
            decoding: list[float] = []
            while engine.busy:
                before, start = engine.metrics.generated_tokens, time.perf_counter()
                all_live = not engine.scheduler.waiting and len(engine.scheduler.running) == batch
                decodes = all_live and all(one.num_pending == 1 for one in engine.scheduler.running)
                if decodes and not decoding:
                    wanted = popularity.union
                    popularity.start_counting()
                engine.step()
                if not decodes:
                    prompt_end = time.perf_counter()
                elif engine.metrics.generated_tokens - before == batch:
                    decoding.append(time.perf_counter() - start)
            if not decoding:
                raise ValueError(f"{batch} sequences never decoded together in {task.ram}; give --ram more")
            decode_s = sum(decoding) / len(decoding) * (load.new - 1)
            return Ran(prompt_end - begun, decode_s, popularity.union, wanted)

        yield from repeated(task, run)


def run_transformers(task: Task) -> Iterator[Timing]:
    """`setting` is the implementation of experts; accelerate's disk offload where the contender is `accelerate`."""
    import torch
    from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

    torch.set_num_threads(task.threads)
    stamps: list[float] = []

    class Stamp(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            stamps.append(time.perf_counter())
            # The next token is a random one, as those of llama.cpp and moedge are.
            return scores.scatter(-1, torch.randint(scores.shape[-1], (len(scores), 1)), float("inf"))

    with torch.inference_mode():
        offload: dict[str, Any] = {}
        if task.contender == "accelerate":
            offload = {"device_map": "auto", "max_memory": {"cpu": task.ram}}
            offload |= {"offload_folder": task.scratch, "offload_state_dict": True}
        model = AutoModelForCausalLM.from_pretrained(
            task.model, dtype=torch.bfloat16, experts_implementation=task.setting, **offload
        ).eval()

        def run(load: Load) -> Ran:
            ids = torch.tensor(task.prompts(load))
            stamps.clear()
            begun = time.perf_counter()
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=load.new, min_new_tokens=load.new,
                do_sample=False, pad_token_id=0, logits_processor=LogitsProcessorList([Stamp()]),
            )  # fmt: skip
            return Ran(stamps[0] - begun, stamps[-1] - stamps[0])

        yield from repeated(task, run)


def run_llama(task: Task) -> Iterator[Timing]:
    """llama.cpp's own benchmark; `setting` is extra options of its command line, `model` a GGUF file.

    A process for each load, because its KV cache has at least 256 tokens for each of the most sequences of a process.
    """
    for cell, load in task.cells.items():
        rates = measured_rates(task)
        bystanders = Bystanders()
        done = subprocess.run(llama_command(task, cell, load), capture_output=True, text=True, check=False)
        others = bystanders.share()
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        # What was measured before it was killed or failed counts.
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                found = json.loads(line)
                yield Timing(found["pl"], found["speed_pp"], found["speed_tg"], peak, others, cell, **rates)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise RuntimeError(f"llama-batched-bench ended with {done.returncode}: {said}")


def llama_command(task: Task, cell: str, load: Load) -> list[str]:
    # Where generated tokens are what counts, one prompt is computed and copied to all sequences: less time goes by.
    shared = [] if cell == PROMPTS else ["-pps"]
    context = load.sequences * (load.prompt + load.new) + 256
    sizes = ["-c", context, "-b", 2048, "-npp", load.prompt, "-ntg", load.new - 1, "-t", task.threads]
    repeats = ",".join([str(load.sequences)] * load.repeats)
    return [
        str(Path(task.binaries) / "llama-batched-bench"), "-m", task.model, *map(str, sizes), "-tb", str(task.threads),
        "-npl", repeats, "--output-format", "jsonl", *shared, *task.setting.split(),
    ]  # fmt: skip


def run_products(task: Task) -> Iterator[Timing]:
    """What no engine can beat in bfloat16: the products of the same passes and nothing else."""
    from bench.roofline import product_seconds
    from moedge.runtime.source.model_source import open_source

    with open_source(task.model) as source:

        def run(load: Load) -> Ran:
            all_tokens = load.sequences * load.prompt
            tokens = min(PASS_TOKENS, all_tokens)
            prompt = product_seconds(source.shape, tokens, task.threads) * all_tokens / tokens
            return Ran(prompt, product_seconds(source.shape, load.sequences, task.threads) * (load.new - 1))

        yield from repeated(task, run)


def run_steps(task: Task) -> Iterator[Timing]:
    """vLLM or OpenVINO, by the interpreter that has it."""
    from bench.peers import step_engines

    yield from {"vllm": step_engines.run_vllm, "openvino": step_engines.run_openvino}[task.contender](task)


CONTENDERS: dict[str, Callable[[Task], Iterator[Timing | Prepared]]] = {
    "prepare": prepare,
    "moedge": run_moedge,
    "transformers": run_transformers,
    "accelerate": run_transformers,
    "llama.cpp": run_llama,
    "vllm": run_steps,
    "openvino": run_steps,
    "products": run_products,
}


if __name__ == "__main__":
    wanted = Task(**json.loads(sys.argv[1]))
    for result in CONTENDERS[wanted.contender](wanted):
        print(json.dumps(asdict(result)), flush=True)
