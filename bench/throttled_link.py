"""Passes over a link of known speed beside what a simulation and the plan say they take, without a GPU.

    python -m bench.throttled_link                                    two models, four budgets, with and without cohorts
    python -m bench.throttled_link --models dense --shares 0 --passes 3

The engine, the planner and the scheduler are the real ones; the device is a thread of the processor whose memory is
that of the host, and whose link is a copy engine that sleeps (tests/support/device/throttled_device.py). A budget is a
share of the way from the least that works to all weights held. Measured are medians of passes in which every sequence
decodes a token, a few of each engine in turn. What passes take of an engine that holds everything, whose turn comes in
the same rounds, goes into the simulation (tests/support/device/link_events.py), with bytes of the plan. Models have
random weights in published widths. Cohorts are cut smaller than on a GPU, as the models are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from safetensors.torch import save_file

from bench import make_model
from bench.link_curves import work_of
from moedge.quant.kernels.gpu import Gpu, Lacks
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.kv.cohorts import CohortSizes
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.plan import hosting
from moedge.runtime.plan.cost_model import CostModel, _decoding
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import PlanRequest, budget_range, solve
from moedge.runtime.plan.rates import Rates
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import DeviceBudget, MemoryBudget, Settings
from moedge.runtime.source.model_source import ModelSource, open_source
from support.device.link_events import Seconds, Simulation
from support.device.throttled_device import ThrottledDevice

HOST_NBYTES = 8 << 30
VOCAB = 8191
# More than holds everything.
HELD_NBYTES = 8 << 30
# granite-3.0-1b-a400m with 4 of its 24 layers; SmolLM2-135M, whole but for its vocabulary.
MIXTURE = make_model.Shape(1024, 4, 16, 8, 64, 32, 8, 512, vocab_size=VOCAB)
DENSE = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": VOCAB, "max_position_embeddings": 4096,
}  # fmt: skip
COHORT_LAYER_NBYTES = 512 << 10


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
    """So many sequences at most in a budget, a share of the way to all weights held; `host_kv` as the option."""

    model: str
    share: float
    sequences: int
    host_kv: str


@dataclass
class Measured:
    """Of passes: seconds, of them computing, attending, inside of layers, and of the link; and bytes that went up."""

    whole: list[float] = field(default_factory=list)
    computing: list[float] = field(default_factory=list)
    attending: list[float] = field(default_factory=list)
    in_layers: list[float] = field(default_factory=list)
    link: list[float] = field(default_factory=list)
    nbytes: list[float] = field(default_factory=list)

    def add(self, *figures: float) -> None:
        for values, figure in zip(vars(self).values(), figures, strict=True):
            values.append(figure)

    def median(self, name: str) -> float:
        return statistics.median(getattr(self, name))


class Bench:
    """A model on the throttled device, as the planner sees it: nothing but the link was measured."""

    def __init__(self, source: ModelSource, options: argparse.Namespace) -> None:
        self.source, self.options = source, options
        # Nearly at their longest while they are measured, as planned for.
        self.prompt = options.longest - options.rounds * (1 + options.passes) - 4
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

    def planned(self, plan: Plan) -> tuple[float, float, float]:
        """What the plan says of a pass: seconds of the link, of the device, and of the host."""
        costs = self.costs.pass_costs(plan)
        cost = costs.cost(_decoding(self.job(plan.max_sequences), plan.max_sequences))
        return cost.link_s, cost.compute_s, cost.host_s

    def simulated(self, plan: Plan, held: Measured) -> float:
        """Seconds of a pass whose layers take as long to compute as where everything is held."""
        # What others take of the processor meanwhile.
        slower = held.median("whole") / held.median("computing")
        attending, layers = slower * held.median("attending"), slower * held.median("in_layers")
        seconds = Seconds(layers - attending, attending, held.median("whole") - layers)
        work = work_of(self.source.shape, plan, seconds)
        return Simulation(work, self.options.link_mbs * 1e6).run(4)


class Running:
    """An engine on a device of its own, whose sequences have all begun to decode; the link was fast until then."""

    def __init__(self, bench: Bench, plan: Plan) -> None:
        self.plan, self.measured, self._options = plan, Measured(), bench.options
        self._throttled = ThrottledDevice(float("inf"))
        with self._throttled, torch.inference_mode():
            self._loaded = load_engine(bench.source, plan, None, self._throttled.device)
            engine, generator = self._loaded.engine, torch.Generator().manual_seed(1)
            for seed in range(plan.max_sequences):
                prompt = torch.randint(300, VOCAB, (bench.prompt,), generator=generator).tolist()
                new = bench.options.longest - bench.prompt
                sampled = SequenceSampling(new, temperature=1.0, top_k=50, seed=seed, ignore_eos=True)
                engine.add(Sequence(prompt, sampled))
            engine.step()
            while engine.scheduler.waiting or any(one.num_pending > 1 for one in engine.scheduler.running):
                engine.step()
        self._attending = Timed(self._loaded.model.attention, "attend")
        self._inside = Timed(self._loaded.model.model.get_decoder().layers, "_arrivals")

    def burst(self) -> None:
        """Passes in which every sequence decodes a token; the first follows a pause in which the rings were filled."""
        cuda = self._throttled.cuda
        cuda.bytes_s = self._options.link_mbs * 1e6
        with self._throttled, torch.inference_mode():
            for index in range(1 + self._options.passes):
                cuda.start_counting()
                self._attending.seconds = self._inside.seconds = 0.0
                computed, begun = time.thread_time(), time.perf_counter()
                self._loaded.engine.step()
                whole, computed = time.perf_counter() - begun, time.thread_time() - computed
                if index:
                    self.measured.add(
                        whole, computed, self._attending.seconds, self._inside.seconds, cuda.busy_s, cuda.nbytes
                    )

    def close(self) -> None:
        self._throttled.cuda.bytes_s = float("inf")
        with self._throttled:
            self._loaded.close()
        self._throttled.cuda.close()


class Timed:
    """Seconds of the processor in a method, or in what it iterates over."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds, method = 0.0, getattr(owner, name)

        def timed(*args: Any) -> Any:
            begun = time.thread_time()
            result = method(*args)
            if isinstance(result, Iterator):
                return iterated(result)
            self.seconds += time.thread_time() - begun
            return result

        def iterated(result: Iterator[Any]) -> Iterator[Any]:
            begun = time.thread_time()
            yield from result
            self.seconds += time.thread_time() - begun

        object.__setattr__(owner, name, timed)


def plans_of(name: str, bench: Bench, options: argparse.Namespace) -> dict[Case, Plan]:
    """By budget: the sequences that the device has room for, and twice as many, of which the host may have some.

    Where the plan gives up weights for them instead, also with the same weights and the others in cohorts.
    """
    plans = {}
    for share in options.shares:
        one = Case(name, share, options.sequences, "off")
        plans[one] = bench.plan(one)
        two = replace(one, sequences=2 * plans[one].max_sequences, host_kv="auto")
        plans[two] = bench.plan(two)
        if plans[two].host_kv is None:
            plans[replace(two, host_kv="given")] = hosted(bench, plans[one])
    return plans


def hosted(bench: Bench, plan: Plan) -> Plan:
    """The plan with as many sequences more, in cohorts."""
    specs = [KVSpec(group, plan.kv, plan.kv_block) for group in bench.source.shape.kv_groups]
    each = [spec.blocks_for(bench.options.longest) for spec in specs]
    layer = max(count * spec.record_nbytes for spec, count in zip(specs, each, strict=True))
    count = -(-plan.max_sequences // max(1, COHORT_LAYER_NBYTES // layer))
    blocks = tuple(-(-plan.max_sequences // count) * one for one in each)
    sizes = CohortSizes.of(specs, count, plan.max_sequences, blocks, plan.tokens_per_pass)
    return replace(plan, max_sequences=2 * plan.max_sequences, host_kv=sizes)


def table(name: str, bench: Bench, options: argparse.Namespace) -> None:
    plans = plans_of(name, bench, options)
    with ExitStack() as opened:
        running, held = {}, {}
        for case, plan in plans.items():
            running[case] = Running(bench, plan)
            opened.callback(running[case].close)
        for sequences in sorted({plan.max_sequences for plan in plans.values()}):
            held[sequences] = Running(bench, bench.plan(Case(name, 1, sequences, "off")))
            opened.callback(held[sequences].close)
        for _ in range(options.rounds):
            for one in (*held.values(), *running.values()):
                one.burst()
    before = 0.0
    for case, one in running.items():
        rate = print_row(case, bench, one, held[one.plan.max_sequences].measured, before)
        before = rate if case.host_kv == "off" else before


def print_row(case: Case, bench: Bench, one: Running, held: Measured, before: float) -> float:
    """Returns the tokens per second; `before` are those of half as many sequences."""
    plan, ran = one.plan, one.measured
    assert plan.budget.device is not None
    link, device, host = bench.planned(plan)
    planned, simulated, took = max(link, device, host), bench.simulated(plan, held), ran.median("whole")
    rate = plan.max_sequences / took
    cells = (
        case.model, f"{plan.budget.device.nbytes / 2**20:.0f}", str(plan.max_sequences), f"{plan.host_kv.sequences} in "
        f"{plan.host_kv.count}{'' if case.host_kv == 'auto' else ', given'}" if plan.host_kv else "0",
        f"{ran.median('nbytes') / 1e6:.1f}",
        f"{link:.3f} / {ran.median('link'):.3f}", " / ".join(
            f"{each:.3f}" for each in (held.median("computing"), held.median("whole"), ran.median("computing"))
        ),
        f"{planned:.3f}", f"{simulated:.3f}", f"{took:.3f}", f"{took / planned:.2f}", f"{took / simulated:.2f}",
        f"{rate:.1f}", "" if case.host_kv == "off" else f"{rate / before:.2f}",
    )  # fmt: skip
    print("| " + " | ".join(cells) + " |", flush=True)
    return rate


COLUMNS = (
    "model", "budget MiB", "sequences", "in cohorts", "MB up", "link s, plan / measured",
    "all held: processor / whole s, here: processor s", "plan s", "simulated s", "measured s", "measured / plan",
    "measured / simulated", "tok/s", "of half as many",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("mixture", "dense"), default=("mixture", "dense"))
    parser.add_argument("--layers", type=int, default=30, help="at most; the models have 4 and 30")
    parser.add_argument("--shares", type=float, nargs="+", default=(0.15, 0.3, 0.5, 0.7))
    parser.add_argument("--sequences", type=int, default=12, help="at most, without cohorts")
    parser.add_argument("--longest", type=int, default=64)
    parser.add_argument("--link-mbs", type=float, default=100, help="MB/s in each direction")
    parser.add_argument("--passes", type=int, default=2, help="in a row")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hosting.LAYER_NBYTES = COHORT_LAYER_NBYTES  # type: ignore[attr-defined]
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    with tempfile.TemporaryDirectory(prefix="link-") as scratch:
        for name in options.models:
            folder = Path(scratch) / name
            make(name, folder, options.layers)
            with open_source(str(folder)) as source:
                table(name, Bench(source, options), options)


if __name__ == "__main__":
    main()
