"""The contenders of bench/compare.py: each loads a model once and is timed on the same rows, phase by phase.

    python -m bench.peers.contenders '{"contender": "transformers", "model": ..., "setting": "eager", ...}'

One process per contender and setting, so that nobody inherits another's memory or threads. Prints a JSON line per run:
tokens per second of the prompt and of decoding, peak memory of the process, and the share of the machine's CPU time
that others used.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moedge.runtime.plan.placement import Plan
    from moedge.runtime.source.model_source import ModelSource

# How each waits for its threads is its own affair; moedge's choice is the one its command line makes.
if __name__ == "__main__" and json.loads(sys.argv[1])["contender"] in ("moedge", "prepare"):
    from moedge.offload.memory import return_memory
    from moedge.runtime.settings.process import settle

    settle()
    return_memory()


# Of moedge's passes, the best of 512 to 8,192 on the machine of docs/performance.md.
PASS_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Task:
    """Rows: `batches` of sequences of `prompt` random tokens, `new` tokens for each. `setting` is its own.

    `ram` is what the contender is told to stay within. `scratch` is a folder for stores of packed weights and what
    accelerate writes; whoever is killed leaves it behind.
    """

    contender: str
    model: str
    setting: str
    batches: list[int]
    prompt: int
    new: int
    repeats: int
    threads: int
    ram: str
    binaries: str = ""
    scratch: str = "scratch"

    def __post_init__(self) -> None:
        if self.new < 2:
            raise ValueError(f"new is {self.new}; the first token ends the prompt, so 2 are the fewest that decode")

    def prompts(self, batch: int) -> list[list[int]]:
        import torch

        generator = torch.Generator().manual_seed(batch)
        vocabulary = int(json.loads((Path(self.model) / "config.json").read_text())["vocab_size"])
        # Past the first few, which tokenizers give to control tokens.
        return torch.randint(min(300, vocabulary // 2), vocabulary, (batch, self.prompt), generator=generator).tolist()


@dataclass(frozen=True, slots=True)
class Timing:
    batch: int
    prompt_tok_s: float
    decode_tok_s: float
    peak_gib: float
    others: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """The folder whose weights moedge will read."""

    reads: str


class Bystanders:
    """The share of the machine's CPU time that processes outside this one and its children use."""

    def __init__(self) -> None:
        self._begin = self._now()

    def share(self) -> float:
        busy, own, wall = (end - begin for end, begin in zip(self._now(), self._begin, strict=True))
        return min(1.0, max(0.0, (busy - own) / (wall * (os.cpu_count() or 1))))

    @staticmethod
    def _now() -> tuple[float, float, float]:
        ticks = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        # Without idle and waiting for disks.
        return (sum(ticks[:3]) + sum(ticks[5:])) / os.sysconf("SC_CLK_TCK"), own, time.perf_counter()


def repeated(task: Task, run: Callable[[int], tuple[float, float]]) -> Iterator[Timing]:
    """Times `run(batch)`, which returns seconds of the prompt and of the `new - 1` passes after it."""
    run(task.batches[0])
    for batch in task.batches:
        for _ in range(task.repeats):
            bystanders = Bystanders()
            prompt_seconds, decode_seconds = run(batch)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            yield Timing(
                batch,
                batch * task.prompt / prompt_seconds,
                batch * (task.new - 1) / decode_seconds,
                peak,
                bystanders.share(),
            )


@contextmanager
def planned(task: Task) -> Iterator[tuple[ModelSource, Plan, Path | None]]:
    """The checkpoint, the plan within `ram`, and the store to stream from, made where it is missing."""
    import torch

    from moedge.runtime.loading.prepare import store_for
    from moedge.runtime.plan.placement import Workload
    from moedge.runtime.plan.planner import make_plan
    from moedge.runtime.settings.budgets import Budgets, MemoryBudget
    from moedge.runtime.settings.settings import Settings
    from moedge.runtime.source.model_source import open_source

    torch.set_num_threads(task.threads)
    quant, _, compute = task.setting.partition("+")
    budgets = Budgets(ram=task.ram, disk_dir=Path(task.scratch))
    with open_source(task.model) as source:
        # Large passes, where there are as many prompt tokens: each expert's rows are multiplied at once.
        most = max(task.batches)
        tokens = max(most, min(PASS_TOKENS, most * task.prompt))
        settings = Settings(
            dtype="auto", quant=quant, tokens_per_pass=tokens, max_sequences=most, compute=compute or "auto"
        )
        budget = MemoryBudget(budgets.host_nbytes())
        plan = make_plan(source.shape, settings, budget, Workload(most, task.prompt + task.new))
        store = store_for(source, plan, budgets)
        yield source, plan, store and store.folder


def prepare(task: Task) -> Iterator[Prepared]:
    """Makes the store that moedge will stream from, in a process that ends: what it read and took is not the run's."""
    with planned(task) as (source, _, store):
        yield Prepared(str(store or source.folder))


def run_moedge(task: Task) -> Iterator[Timing]:
    from moedge.runtime.engine.sequence import Sequence
    from moedge.runtime.loading.engine_loader import load_engine
    from moedge.runtime.sampling.params import SamplingParams

    with planned(task) as (source, plan, store), closing(load_engine(source, plan, store)) as loaded:
        engine = loaded.engine
        # Repeated prompts would be found in the cache, and their tokens not be computed.
        engine.scheduler.cache.sharing = False

        def run(batch: int) -> tuple[float, float]:
            for prompt in task.prompts(batch):
                engine.add(Sequence(prompt, SamplingParams(task.new, ignore_eos=True)))
            begun = time.perf_counter()
            # Sequences that decode while the last prompts are computed are not counted, though they work.
            decoding = []
            while engine.busy:
                before, start = engine.metrics.generated_tokens, time.perf_counter()
                all_live = not engine.scheduler.waiting and len(engine.scheduler.running) == batch
                decodes = all_live and all(one.num_pending == 1 for one in engine.scheduler.running)
                engine.step()
                if not decodes:
                    prompt_end = time.perf_counter()
                elif engine.metrics.generated_tokens - before == batch:
                    decoding.append(time.perf_counter() - start)
            if not decoding:
                raise ValueError(f"{batch} sequences never decoded together in {task.ram}; give --ram more")
            return prompt_end - begun, sum(decoding) / len(decoding) * (task.new - 1)

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
            return scores

    with torch.inference_mode():
        offload: dict[str, Any] = {}
        if task.contender == "accelerate":
            offload = {"device_map": "auto", "max_memory": {"cpu": task.ram}}
            offload |= {"offload_folder": task.scratch, "offload_state_dict": True}
        model = AutoModelForCausalLM.from_pretrained(
            task.model, dtype=torch.bfloat16, experts_implementation=task.setting, **offload
        ).eval()

        def run(batch: int) -> tuple[float, float]:
            ids = torch.tensor(task.prompts(batch))
            stamps.clear()
            begun = time.perf_counter()
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=task.new, min_new_tokens=task.new,
                do_sample=False, pad_token_id=0, logits_processor=LogitsProcessorList([Stamp()]),
            )  # fmt: skip
            return stamps[0] - begun, stamps[-1] - stamps[0]

        yield from repeated(task, run)


def run_llama(task: Task) -> Iterator[Timing]:
    """llama.cpp's own benchmark; `setting` is extra options of its command line, `model` a GGUF file."""
    context = max(task.batches) * (task.prompt + task.new) + 256
    sizes = ["-c", context, "-b", 2048, "-ub", 512, "-npp", task.prompt, "-ntg", task.new, "-t", task.threads]
    batches = ",".join(map(str, task.batches))
    command = [
        str(Path(task.binaries) / "llama-batched-bench"), "-m", task.model, *map(str, sizes), "-tb", str(task.threads),
        "-npl", batches, "--output-format", "jsonl", *task.setting.split(),
    ]  # fmt: skip
    for _ in range(task.repeats):
        bystanders = Bystanders()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        # What was measured before it was killed or failed counts.
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                found = json.loads(line)
                yield Timing(found["pl"], found["speed_pp"], found["speed_tg"], peak, bystanders.share())
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise RuntimeError(f"llama-batched-bench ended with {done.returncode}: {said}")


def run_products(task: Task) -> Iterator[Timing]:
    """What no engine can beat in bfloat16: the products of the same passes and nothing else."""
    from bench.roofline import product_seconds
    from moedge.runtime.source.model_source import open_source

    with open_source(task.model) as source:

        def run(batch: int) -> tuple[float, float]:
            tokens = min(PASS_TOKENS, batch * task.prompt)
            prompt = product_seconds(source.shape, tokens, task.threads) * batch * task.prompt / tokens
            return prompt, product_seconds(source.shape, batch, task.threads) * (task.new - 1)

        yield from repeated(task, run)


CONTENDERS: dict[str, Callable[[Task], Iterator[Timing | Prepared]]] = {
    "prepare": prepare,
    "moedge": run_moedge,
    "transformers": run_transformers,
    "accelerate": run_transformers,
    "llama.cpp": run_llama,
    "products": run_products,
}


if __name__ == "__main__":
    wanted = Task(**json.loads(sys.argv[1]))
    for result in CONTENDERS[wanted.contender](wanted):
        print(json.dumps(asdict(result)), flush=True)
