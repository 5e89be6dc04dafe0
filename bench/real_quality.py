"""What each format costs on weights that were trained by others; prints the tables of docs/quality.md.

    python -m bench.real_quality weights                 weights and compute: perplexity over 6,128 tokens, 40 answers
    python -m bench.real_quality kv                      formats of keys and values, weights as they are, and in int4
    python -m bench.real_quality json --rows 200         JSON answers, free and by a grammar: how many are valid, and
                                                         which fields are right, and those of unquantized weights
    python -m bench.real_quality executors               fused layers beside the model's own: which are nearer to the
                                                         format's definition in float32, and by how much
    python -m bench.real_quality products                each product of a loaded model with what reaches it, beside
                                                         float64 of the format's definition
    python -m bench.real_quality definitions             transformers' answers with formats' weights, made here, beside
                                                         those that were recorded on another processor
    python -m bench.real_quality llama --llama-bin DIR   llama.cpp's Q8_0, Q4_K_M and Q4_0 of the same weights; DIR has
                                                         llama-quantize and llama-perplexity

The model is SmolLM2-135M-Instruct (bench.real_model), as it comes, in Q4_1, and rotated off that grid (bench.rotate):
`--model original` or `--model rotated` takes one of them. `--mixture DIR` takes what bench.make_real_mixture wrote,
instead: `weights` and `json` then have experts in three bits, too, as they are and calibrated by text that is not
scored, and `weights` the KL divergence from transformers in float32.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bench import ROOT
from bench.make_real_mixture import stdlib
from moedge.quant.formats.format import CALIBRATED, EXPERT_FORMATS
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.loading.prepare import calibrate, prepare
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.source.model_source import open_source
from support.heldout import predict
from support.real import cases, recorded, records, rotation, smollm2, tables
from support.real.cases import Case
from support.real.definition import Stock, round_activations
from support.real.measure import Found, ask, measure, perplexity
from support.real.tables import loss
from support.real.text import FEW, WINDOW, WINDOWS, prose, same_answers, windows

MODELS: Mapping[str, tuple[str, Callable[[], Path]]] = {
    "original": (smollm2.TITLE, smollm2.smollm2),
    "rotated": (rotation.TITLE, rotation.rotated),
}
CUT = "SmolLM2-135M-Instruct, cut into 24 experts a layer, 16 a token (no trained mixture)"
# What llama-quantize makes. Rows of 576 have no whole blocks of 256, where it takes Q5_0 and Q8_0 for K-quants.
KINDS = ("Q8_0", "Q4_K_M", "Q4_0")
# Characters of each text by which experts in few bits are calibrated: 16,000 tokens in all.
CALIBRATION = 32_000
PERPLEXITY = re.compile(r"Final estimate: PPL = ([\d.]+)")


def run(model: Path, some: list[Case], options: argparse.Namespace) -> Iterator[tuple[Case, Found]]:
    for case, found in measure(model, some, options.windows, options.questions):
        if isinstance(found, str):
            raise SystemExit(f"{case.title}: {found}")
        yield case, found


def head(*names: str) -> None:
    line(*names)
    print("|" + "---|" * len(names))


def line(*cells: object) -> None:
    print(tables.row(*cells), flush=True)


def print_weights(model: Path, options: argparse.Namespace) -> None:
    """Beside transformers with the file's weights in float32, and beside each format's own definition."""
    stock = Stock(model)

    @cache
    def defined(quant: str, compute: str, packed_from: str, dtype: str) -> Found:
        windows = 0 if packed_from == "bf16" else options.windows
        return stock.define(quant, compute, packed_from, dtype).ask(windows, options.questions)

    for each in tables.weights(run(model, list(cases.weights_and_compute()), options), defined):
        print(each, flush=True)


@contextmanager
def subjects(model: Path, options: argparse.Namespace) -> Iterator[list[tuple[str, Case, Path]]]:
    """The name of each format of weights, a case, and the model or the store that it is asked of."""
    every = [*cases.weights_and_compute()]
    if options.mixture:
        some = [case for case in every if case.quant in ("int8", "int4")]
        every += [replace(case, quant=f"{case.quant}+{low}") for low in EXPERT_FORMATS for case in some]
    found = [(case.quant, case, model) for case in every if asked_for(case, options)]
    with tempfile.TemporaryDirectory(dir=smollm2.cache()) as folder:
        low = [case for _, case, _ in found if "+" in case.quant]
        prepare_stores(model, stores := {case.quant: Path(folder, case.quant) for case in low})
        # Formats that none may have who did not calibrate them.
        taken = [each for each in found if CALIBRATED.isdisjoint(each[1].quant.split("+"))]
        yield taken + [(f"{case.quant}, calibrated", case, stores[case.quant]) for case in low]


def asked_for(case: Case, options: argparse.Namespace) -> bool:
    return not options.weights or case.quant in options.weights


def calibration_text() -> str:
    """Pages of moedge and a module of Python, none of which is scored."""
    pages = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    return pages[:CALIBRATION] + stdlib(["argparse"])[:CALIBRATION]


def prepare_stores(model: Path, stores: Mapping[str, Path]) -> None:
    """Stores by their formats of weights, errors weighed by the calibration text."""
    if not stores:
        return
    with open_source(str(model)) as source:
        importance = calibrate(source, calibration_text(), "bf16", Budgets())
        for quant, store in stores.items():
            prepare(source, store, quant, "bf16", MemoryBudget(4 << 30), importance=importance)


def print_mixture(model: Path, options: argparse.Namespace) -> None:
    """Beside transformers in float32: its experts are no linear layers, in which `print_weights` puts what a format
    means."""
    stock = Stock(model).define("none", "float", "fp32", "fp32")
    ids = windows(stock.encode, options.windows)
    exact = [stock.predict(each).float() for each in ids]
    del stock
    wanted = perplexity(map(chosen, exact, ids))
    head("weights", "compute", "perplexity", "against float32", "KL, nats a token", "answers as with none")
    line("transformers, fp32", "", f"{wanted:.4f}", "", "", "")
    native: Found | None = None
    with subjects(model, options) as every:
        for name, case, path in every:
            found, divergence = judged(path, case, exact, ids, options)
            native = native or found
            same = f"{same_answers(found.answers, native.answers)}/{options.questions}"
            against = loss(found.perplexity, wanted)
            line(name, case.compute, f"{found.perplexity:.4f}", against, f"{divergence:.4f}", same)


def judged(
    model: Path, case: Case, exact: list[Tensor], ids: list[list[int]], options: argparse.Namespace
) -> tuple[Found, float]:
    """What a case gives, and its mean divergence from the log probabilities `exact`, [n - 1, V] for n `ids`."""
    from moedge import LLM

    with LLM(str(model), ram="6GiB", gpu_mem=0, max_model_len=WINDOW + 8, rows=FEW, **case.options) as llm:
        found = ask(llm, 0, WINDOW, options.questions)
        logprobs, sums = [], []
        for p, each in zip(exact, ids, strict=True):
            q = torch.cat(list(predict(llm._engine.engine.engine, each)))[:-1]
            logprobs.append(chosen(q, each))
            sums.append(float((p.double().exp() * (p - q)).sum()))
    return replace(found, logprobs=logprobs), sum(sums) / sum(map(len, exact))


def chosen(predicted: Tensor, ids: list[int]) -> list[float]:
    """Of the log probabilities [n - 1, V] those of the n `ids` behind the first."""
    found: list[float] = predicted.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return found


def print_kv(model: Path, options: argparse.Namespace) -> None:
    """In float32, so that only the cache differs, and with weights in int4 as a job has them."""
    base = next(cases.weights_and_compute())
    head("weights", "arithmetic", "KV", "perplexity", "against native KV", "answers as with native KV")
    for quant, dtype in (("none", "fp32"), ("int4", "bf16")):
        some = [replace(base, quant=quant, dtype=dtype, kv=kv) for kv in cases.FACTORS["kv"]]
        native: Found | None = None
        for case, found in run(model, some, options):
            native = native or found
            same = f"{same_answers(found.answers, native.answers)}/{options.questions}"
            line(quant, dtype, case.kv, f"{found.perplexity:.4f}", loss(found.perplexity, native.perplexity), same)


def print_json(model: Path, options: argparse.Namespace) -> None:
    """Records in a sentence, and what is asked of them, answered as text and by a grammar."""
    from moedge import LLM, SamplingParams

    some = records.make(options.rows)
    chats = [[{"role": "user", "content": record.question}] for record in some]
    schema = {"type": "json_schema", "json_schema": {"name": "record", "schema": records.SCHEMA}}
    head("weights", "compute", "KV", "valid, free", "valid, by grammar", "fields right", "fields as with none")
    wanted: list[Any] = []
    with subjects(model, options) as every:
        if not options.mixture:
            every += [(each[0], replace(each[1], kv=kv), model) for each in every[:1] for kv in cases.FACTORS["kv"][1:]]
        for name, case, path in every:
            with LLM(str(path), ram="6GiB", gpu_mem=0, max_model_len=512, rows=options.rows, **case.options) as llm:
                free, bound = (
                    [
                        one.outputs[0].text
                        for one in llm.chat(chats, SamplingParams(max_tokens=96, response_format=form))
                    ]
                    for form in (None, schema)
                )
            given = [records.read(text) for text in bound]
            wanted = wanted or given
            right = sum(records.same(a, record.fields) for a, record in zip(given, some, strict=True))
            as_none = sum(records.same(a, b) for a, b in zip(given, wanted, strict=True))
            fields = len(records.SCHEMA["required"]) * len(some)
            valid = [sum(each is not None for each in map(records.read, texts)) for texts in (free, bound)]
            line(name, case.compute, case.kv, *valid, f"{right / fields:.1%}", f"{as_none / fields:.1%}")


def print_executors(model: Path, options: argparse.Namespace) -> None:
    """Rounding differs between the two, not what they mean: neither may be further from the definition than chance."""
    stock = Stock(model)
    names = "fused", "own layers", "definition in bf16"
    head(
        "weights", "compute", *(f"answers as the definition: {name}" for name in names),
        *(f"log-probabilities, mean distance: {name}" for name in names),
        *(f"fused less {name}" for name in names[1:]), "perplexity: definition", *names,
    )  # fmt: skip
    for case in cases.weights_and_compute():
        ours = [asked_by(model, case, fused, options) for fused in (True, False)]
        wanted, in_bf16 = (
            stock.define(case.quant, case.compute, "bf16", dtype).ask(options.windows, options.questions)
            for dtype in ("fp32", "bf16")
        )
        found = [*ours, in_bf16]
        same = [same_answers(each.answers, wanted.answers) for each in found]
        distances = [distance(each, wanted) for each in found]
        less = [f"{mean(pair):+.4f} ± {error(pair):.4f}" for pair in (subtract(distances[0], d) for d in distances[1:])]
        means = [f"{mean(each):.4f}" for each in distances]
        line(case.quant, case.compute, *same, *means, *less, *(f"{each.perplexity:.4f}" for each in (wanted, *found)))


def print_definitions(model: Path, options: argparse.Namespace) -> None:
    """How far a definition says the same on any processor: by how much others may differ from it."""
    stock = Stock(model)
    before = recorded.recorded(next(name for name, (_, path) in MODELS.items() if path() == model))
    head("weights", "compute", "in", "answers that begin as recorded", "log-probabilities, mean distance")
    for case in cases.weights_and_compute():
        for dtype in ("fp32", "bf16"):
            key = (case.quant, case.compute, "bf16", dtype)
            found = stock.define(*key).ask(recorded.num_windows(key), FEW)
            apart = f"{mean(distance(found, before[key])):.4f}" if found.logprobs else ""
            line(case.quant, case.compute, dtype, f"{same_answers(found.answers, before[key].answers)}/{FEW}", apart)


@torch.inference_mode()
def print_products(model: Path, options: argparse.Namespace) -> None:
    """Answers amplify any rounding; a product shows alone whether it means what its format and compute say."""
    stock = Stock(model)
    head(
        "weights", "compute", "products", "relative L2 to float64, worst: moedge", "median", "result in bf16, worst",
        "activations not rounded, median", "with one scale a row, median",
    )  # fmt: skip
    for case in cases.weights_and_compute():
        given = stock.define(case.quant, case.compute, "bf16", "bf16").inputs()
        settings = Settings(dtype="bf16", quant=case.quant, kv="bf16", compute=case.compute)
        with open_source(str(model)) as source:
            plan = make_plan(source.shape, settings, MemoryBudget(4 << 30), Workload(8, WINDOW))
            with closing(load_engine(source, plan)) as loaded:
                modules = dict(loaded.model.model.named_modules())
                found = [product_errors(modules[name], rows, case.compute) for name, rows in given.items()]
        worst = max(each[0] for each in found), max(each[1] for each in found)
        medians = [f"{median(each[at] for each in found):.2e}" for at in (0, 2, 3)]
        line(case.quant, case.compute, len(found), f"{worst[0]:.2e}", medians[0], f"{worst[1]:.2e}", *medians[1:])


def product_errors(linear: Any, rows: Tensor, compute: str) -> list[float]:
    """Of a packed layer's product, of the right one rounded to bf16, and of right ones of other activations."""
    rows, weight = rows.bfloat16(), linear.packed.dequantize(torch.empty(linear.packed.shape)).double()
    # A head that is the embedding, too, is no code: its inputs are not rounded.
    rounds = compute == "int8" and linear.packed.layout.format != "none"
    right = (round_activations(rows).double() if rounds else rows.double()) @ weight.T
    scale = rows.float().abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    others = rows.double(), ((rows / scale).round() * scale).double()
    found = [linear.compute.linear(rows, linear.packed), right.bfloat16(), *(each @ weight.T for each in others)]
    return [float((each.double() - right).norm() / right.norm()) for each in found]


def asked_by(model: Path, case: Case, fused: bool, options: argparse.Namespace) -> Found:
    """What a case gives by fused layers, or with none: a library that is missing fuses nothing."""
    from moedge import LLM

    here = nullcontext() if fused else patch("moedge.runtime.model.fused.selftest.available", return_value=False)
    settings: dict[str, Any] = {"max_model_len": WINDOW + 8, "rows": options.questions, **case.options}
    with here, LLM(str(model), ram="6GiB", gpu_mem=0, **settings) as llm:
        return ask(llm, options.windows, WINDOW, options.questions)


def distance(a: Found, b: Found) -> list[float]:
    """The mean absolute difference of log-probabilities in each window: squares would show its few largest alone."""
    return [
        mean([abs(x - y) for x, y in zip(mine, theirs, strict=True)])
        for mine, theirs in zip(a.logprobs, b.logprobs, strict=True)
    ]


def subtract(a: list[float], b: list[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def error(values: list[float]) -> float:
    """The standard error of their mean."""
    return stdev(values) / math.sqrt(len(values))


def print_llama(model: Path, options: argparse.Namespace) -> None:
    """Of each window the second half is scored, as llama-perplexity does: by llama.cpp and by moedge of the same file,
    and by moedge in its own formats."""
    head("engine", "weights", "perplexity of second halves", "against its own bf16", "against llama.cpp, same file")
    own = [*cases.weights_and_compute()]
    with tempfile.TemporaryDirectory(dir=smollm2.cache()) as folder:
        text = Path(folder, "prose.txt")
        text.write_text(prose())
        if model.is_file():
            exact = quantized(model, "BF16", Path(folder), options)
        else:
            exact = rotation.write_gguf(model, Path(folder, "exact.gguf"))
        program = options.llama_bin / "llama-perplexity"
        settings = ["-c", WINDOW, "-b", WINDOW, "--chunks", options.windows, "-t", 2]
        wanted = native = 0.0
        for kind in ("BF16", *KINDS):
            file = exact if kind == "BF16" else quantized(exact, kind, Path(folder), options)
            found = float(searched(PERPLEXITY, said([program, "-m", file, "-f", text, *settings])))
            wanted = wanted or found
            line("llama.cpp", kind, f"{found:.4f}", loss(found, wanted), "")
            quant, computes = (
                ("none" if kind == "BF16" else "kept"),
                ("float", "int8") if kind == "Q8_0" else ("float",),
            )
            some = [replace(own[0], quant=quant, compute=compute) for compute in computes]
            for case, halves in second_halves(file, some, options):
                native = native or halves
                line("moedge", f"{kind}, {case.compute}", f"{halves:.4f}", loss(halves, native), loss(halves, found))
    for case, halves in second_halves(model, [case for case in own[1:] if asked_for(case, options)], options):
        line("moedge", f"{case.quant}, {case.compute}", f"{halves:.4f}", loss(halves, native), "")


def second_halves(model: Path, some: list[Case], options: argparse.Namespace) -> Iterator[tuple[Case, float]]:
    for case, each in run(model, some, argparse.Namespace(windows=options.windows, questions=0)):
        yield case, perplexity([window[WINDOW // 2 :] for window in each.logprobs])


def quantized(file: Path, kind: str, folder: Path, options: argparse.Namespace) -> Path:
    made = folder / f"{kind}.gguf"
    said([options.llama_bin / "llama-quantize", "--allow-requantize", file, made, kind, "2"])
    return made


def said(command: list[Any]) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} ended with {done.returncode}: {done.stderr[-500:]}")
    return done.stdout + done.stderr


def searched(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    if found is None:
        raise SystemExit(f"nothing like {pattern.pattern} was printed: {text[-500:]}")
    return found[1]


TABLES = {
    "weights": print_weights, "kv": print_kv, "json": print_json, "executors": print_executors,
    "products": print_products, "definitions": print_definitions, "llama": print_llama,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--model", choices=MODELS, action="append", help="both, if none is named")
    parser.add_argument("--windows", type=int, default=WINDOWS, help=f"of {WINDOW} tokens")
    parser.add_argument("--questions", type=int, default=FEW, help="at most 160")
    parser.add_argument(
        "--weights", nargs="+", help="of weights, json and llama, such as none int4 int4+int3; all by default"
    )
    parser.add_argument("--rows", type=int, default=200, help="JSON answers")
    parser.add_argument("--llama-bin", type=Path, help="where llama-quantize and llama-perplexity lie")
    parser.add_argument("--mixture", type=Path, help="a folder that bench.make_real_mixture wrote")
    options = parser.parse_args()
    if options.table == "llama" and options.llama_bin is None:
        parser.error("llama takes --llama-bin")
    models = MODELS if options.mixture is None else {"mixture": (CUT, lambda: options.mixture)}
    table = print_mixture if options.mixture and options.table == "weights" else TABLES[options.table]
    for name in options.model or models:
        title, path = models[name]
        print(f"\n{title}; {options.windows} windows of {WINDOW} tokens\n", flush=True)
        table(path(), options)


if __name__ == "__main__":
    main()
