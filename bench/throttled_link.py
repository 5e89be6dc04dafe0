"""Passes over a link of known speed beside what a simulation and the plan say they take, without a GPU.

    python -m bench.throttled_link                                    two models, four budgets, with and without cohorts
    python -m bench.throttled_link --models dense --shares 0 --passes 3

The engine, the planner and the scheduler are the real ones; the device is a thread of the processor whose memory is
that of the host, and whose link a copy engine that sleeps (tests/support/device/throttled_device.py). A budget is a share of
the way from the least that works to all weights held. `measured` are medians of passes in which every sequence decodes
a token, of all rounds; what layers compute is measured in the same round with everything held and nothing on the link,
and goes into the simulation (bench/link_events.py) with bytes from the plan. Models have random weights in published
widths. `LAYER_NBYTES`, by which cohorts are cut, is smaller than on a GPU as the model is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from safetensors.torch import save_file

from bench import link_events, make_model
from moedge.quant.kernels.gpu import Gpu, Lacks
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.loading.engine_loader import LoadedEngine, load_engine
from moedge.runtime.plan import hosting
from moedge.runtime.plan.cost_model import CostModel, _decoding, _PassCosts
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import PlanRequest, budget_range, solve
from moedge.runtime.plan.rates import Rates
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import DeviceBudget, MemoryBudget, Settings
from moedge.runtime.source.model_source import ModelSource, open_source
from support.device.throttled_device import ThrottledCuda, ThrottledDevice

HOST_NBYTES = 8 << 30
VOCAB, WARM = 8191, 2
# More than holds everything.
HELD_NBYTES = 8 << 30
# granite-3.0-1b-a400m with 4 of its 24 layers; SmolLM2-135M, whole but for its vocabulary.
MIXTURE = make_model.Shape(1024, 4, 16, 8, 64, 32, 8, 512, vocab_size=VOCAB)
DENSE = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": VOCAB, "max_position_embeddings": 4096,
}  # fmt: skip
COHORT_LAYER_NBYTES = 2 << 20


def make(name: str, folder: Path, layers: int) -> None:
    """Writes a checkpoint of random weights, with `layers` at most."""
    folder.mkdir()
    if name == "mixture":
        shape = replace(MIXTURE, num_hidden_layers=min(layers, MIXTURE.num_hidden_layers))
        about = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
        config = asdict(shape) | {"intermediate_size": shape.moe_intermediate_size}
        make_model.write_weights(shape, folder, seed=1, skew=False)
    else:
        config = DENSE | {"num_hidden_layers": min(layers, DENSE["num_hidden_layers"])}
        about = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        write_dense(config, folder)
    (folder / "config.json").write_text(json.dumps(about | {"dtype": "bfloat16", "eos_token_id": 1} | config))
    make_model.write_tokenizer(VOCAB, folder)


def write_dense(config: dict[str, int], folder: Path) -> None:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    sizes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    weights, ones = make_model.Weights(1, 0, hidden, skew=False), torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {name: weights.matrix(VOCAB, hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    norms = ["model.norm"]
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        tensors |= {f"{prefix}{name}.weight": weights.matrix(*size) for name, size in sizes.items()}
        norms += [f"{prefix}{name}_layernorm" for name in ("input", "post_attention")]
    tensors |= {f"{name}.weight": ones.clone() for name in norms}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@dataclass(frozen=True)
class Case:
    """So many sequences at most in a budget, which is a share of the way to all weights held; `host_kv` as the option."""

    model: str
    share: float
    sequences: int
    host_kv: str


@dataclass
class Seconds:
    """Of passes: whole, computing, attending and inside of layers as parts of that, and copying up, and bytes up."""

    whole: list[float] = field(default_factory=list)
    computing: list[float] = field(default_factory=list)
    attending: list[float] = field(default_factory=list)
    in_layers: list[float] = field(default_factory=list)
    link: list[float] = field(default_factory=list)
    nbytes: list[float] = field(default_factory=list)

    def add(self, other: Seconds) -> None:
        for name, values in vars(other).items():
            getattr(self, name).extend(values)

    def median(self, name: str) -> float:
        return statistics.median(getattr(self, name))


class Bench:
    """A model on the throttled device, as the planner sees it: nothing but the link was measured."""

    def __init__(self, source: ModelSource, options: argparse.Namespace) -> None:
        self.source, self.options = source, options
        # Nearly at their longest while they are measured, as planned for.
        self.prompt = options.longest - options.passes - 2 * WARM
        self.gpu = Gpu((7, 0), 1, Lacks.everything("a processor has no kernels of a GPU"))
        self.costs = CostModel(source.shape, Rates(link_bytes_s=options.link_mbs * 1e6))

    def job(self, sequences: int) -> Workload:
        longest, prompt = self.options.longest, self.prompt
        return Workload(sequences, longest, longest, prompt * sequences, (longest - prompt) * sequences)

    def plan(self, case: Case) -> Plan:
        settings = Settings(
            quant="none", kv="bf16", tokens_per_pass=256, max_sequences=case.sequences, speculate="off",
            host_kv=case.host_kv,
        )  # fmt: skip
        room = DeviceBudget(0, 0, 0, self.gpu)
        smallest, whole = budget_range(self.source.shape, settings, self.job(1), room)
        nbytes = smallest + int(case.share * (whole - smallest)) if case.share < 1 else HELD_NBYTES
        budget = MemoryBudget(HOST_NBYTES, replace(room, nbytes=nbytes))
        job = self.job(case.sequences)
        return solve(PlanRequest(costs=self.costs, workload=job, budget=budget, settings=settings)).plan

    def run(self, plan: Plan) -> Seconds:
        with ThrottledDevice(float("inf")) as throttled, torch.inference_mode():
            with closing(load_engine(self.source, plan, None, throttled.device)) as loaded:
                return self._decode(loaded, throttled, plan.max_sequences)

    def _decode(self, loaded: LoadedEngine, throttled: ThrottledDevice, sequences: int) -> Seconds:
        """Passes in which every sequence decodes a token; the link is fast until then."""
        engine, cuda, seconds = loaded.engine, throttled.cuda, Seconds()
        generator = torch.Generator().manual_seed(1)
        for seed in range(sequences):
            prompt = torch.randint(300, VOCAB, (self.prompt,), generator=generator).tolist()
            new = self.options.longest - self.prompt
            engine.add(Sequence(prompt, SequenceSampling(new, temperature=1.0, top_k=50, seed=seed, ignore_eos=True)))
        engine.step()
        while engine.scheduler.waiting or any(one.num_pending > 1 for one in engine.scheduler.running):
            engine.step()
        attending = Timed(loaded.model.attention, "attend", cuda)
        inside = Timed(loaded.model.model.get_decoder().layers, "_arrivals", cuda)
        cuda.bytes_s = self.options.link_mbs * 1e6
        for index in range(WARM + self.options.passes):
            cuda.start_counting()
            attending.seconds = inside.seconds = 0.0
            begun = time.perf_counter()
            engine.step()
            whole = time.perf_counter() - begun
            if index >= WARM:
                found = (whole, whole - cuda.waited_s, attending.seconds, inside.seconds, cuda.busy_s, cuda.nbytes)
                seconds.add(Seconds(*([each] for each in found)))
        cuda.bytes_s = float("inf")
        return seconds

    def planned(self, plan: Plan) -> tuple[float, float, float]:
        """What the plan says of a pass: seconds of the link, of the device, and of the host."""
        costs = _PassCosts(self.costs._work(plan.quant, plan.dtype, None), plan, self.costs.rates)
        cost = costs.cost(_decoding(self.job(plan.max_sequences), plan.max_sequences))
        return cost.link_s, cost.compute_s, cost.host_s

    def work(self, plan: Plan, held: Seconds) -> link_events.PassWork:
        """The pass of a plan, whose layers take as long to compute as where everything is held."""
        attending, layers = held.median("attending"), held.median("in_layers")
        seconds = link_events.Seconds(layers - attending, attending, held.median("computing") - layers)
        return link_events.work_of(self.source.shape, plan, seconds)


class Timed:
    """Seconds of a method, or of what it iterates over, beside those in which compute waited."""

    def __init__(self, owner: Any, name: str, cuda: ThrottledCuda) -> None:
        self.seconds, method = 0.0, getattr(owner, name)

        def now() -> float:
            return time.perf_counter() - cuda.waited_s

        def timed(*args: Any) -> Any:
            begun = now()
            result = method(*args)
            if isinstance(result, Iterator):
                return iterated(result)
            self.seconds += now() - begun
            return result

        def iterated(result: Iterator[Any]) -> Iterator[Any]:
            begun = now()
            yield from result
            self.seconds += now() - begun

        object.__setattr__(owner, name, timed)


def cases(name: str, options: argparse.Namespace) -> Iterator[tuple[Case, Case]]:
    """Pairs: the sequences that the device has room for, and twice as many, where the plan may keep them in the host."""
    for share in options.shares:
        one = Case(name, share, options.sequences, "off")
        yield one, replace(one, sequences=2 * options.sequences, host_kv="auto")


def table(name: str, bench: Bench, options: argparse.Namespace) -> None:
    plans: dict[Case, Plan] = {}
    for one, two in cases(name, options):
        plans[one] = bench.plan(one)
        plans[two] = bench.plan(replace(two, sequences=2 * plans[one].max_sequences))
    measured: dict[Case, Seconds] = defaultdict(Seconds)
    held: dict[int, Seconds] = defaultdict(Seconds)
    for _ in range(options.rounds):
        for sequences in sorted({plan.max_sequences for plan in plans.values()}):
            held[sequences].add(bench.run(bench.plan(Case(name, 1, sequences, "off"))))
        for case, plan in plans.items():
            measured[case].add(bench.run(plan))
    before = 0.0
    for case, plan in plans.items():
        ran, computing = measured[case], held[plan.max_sequences]
        link, device, host = bench.planned(plan)
        simulated = link_events.Simulation(bench.work(plan, computing), options.link_mbs * 1e6).run(4)
        took, rate = ran.median("whole"), plan.max_sequences / ran.median("whole")
        cells = (
            name, f"{plan.budget.device.nbytes / 2**20:.0f}", str(plan.max_sequences),
            f"{plan.host_kv.sequences} in {plan.host_kv.count}" if plan.host_kv else "0",
            f"{ran.median('nbytes') / 1e6:.1f}", f"{link:.3f} / {ran.median('link'):.3f}",
            f"{computing.median('computing'):.3f} / {ran.median('computing'):.3f}",
            f"{max(link, device, host):.3f}", f"{simulated:.3f}", f"{took:.3f}", f"{took / simulated:.2f}",
            f"{took / max(link, device, host):.2f}", f"{rate:.1f}",
            "" if case.host_kv == "off" else f"{rate / before:.2f}",
        )  # fmt: skip
        before = rate
        print("| " + " | ".join(cells) + " |", flush=True)


COLUMNS = (
    "model", "budget MiB", "sequences", "in cohorts", "MB up", "link s, plan / measured", "computing s, held / here",
    "plan s", "simulated s", "measured s", "measured / simulated", "measured / plan", "tok/s", "of half as many",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("mixture", "dense"), default=("mixture", "dense"))
    parser.add_argument("--layers", type=int, default=30, help="at most; the models have 4 and 30")
    parser.add_argument("--shares", type=float, nargs="+", default=(0.15, 0.3, 0.5, 0.7))
    parser.add_argument("--sequences", type=int, default=12, help="at most, without cohorts")
    parser.add_argument("--longest", type=int, default=64)
    parser.add_argument("--link-mbs", type=float, default=150, help="MB/s in each direction")
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hosting.LAYER_NBYTES = COHORT_LAYER_NBYTES
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    with tempfile.TemporaryDirectory(prefix="link-") as scratch:
        for name in options.models:
            folder = Path(scratch) / name
            make(name, folder, options.layers)
            with open_source(str(folder)) as source:
                table(name, Bench(source, options), options)


if __name__ == "__main__":
    main()
