"""What each format costs on text that the demo model never saw; prints the tables of bench/results/quality.md.

python -m bench.quality weights    perplexity by weight format, against stock transformers; with --llama-bin, where
                                   llama-quantize lies, also of its Q4_0, read by moedge
python -m bench.quality kv         perplexity by KV format, and divergence from a native cache
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.peers.gguf_files import gguf_of
from moedge.quant.kv.codec import KeyTransform
from moedge.runtime.attention.protocol import AttentionBackend, AttentionCall
from moedge.runtime.loading.engine_loader import LoadedEngine, load_engine
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.settings.settings import MemoryBudget, Settings
from moedge.runtime.source.model_source import ModelSource, open_source
from moedge.runtime.weights.key_offsets import fixed_token_ids, measure
from support.heldout import DEMO, predict

# Arithmetic, weights, --compute.
ROWS = [
    ("fp32", "none", "auto"),
    ("bf16", "none", "auto"),
    ("bf16", "int8", "float"),
    ("bf16", "int8", "int8"),
    ("bf16", "int4", "float"),
    ("bf16", "int4", "int8"),
    ("bf16", "nf4", "auto"),
    ("bf16", "mxfp4", "float"),
    ("bf16", "mxfp4", "int8"),
]


def perplexity(logprobs: Iterable[torch.Tensor], windows: list[list[int]]) -> float:
    """exp of the mean negative log probability of every token of a window but its first; `logprobs` [n, V] a window."""
    scored = [
        predicted[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1))
        for predicted, ids in zip(logprobs, windows, strict=True)
    ]
    return math.exp(-float(torch.cat(scored).mean()))


def stock(folder: Path, windows: list[list[int]]) -> Iterator[torch.Tensor]:
    """What transformers predicts, window by window: fp64 [n, V]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for ids in windows:
        with torch.inference_mode():
            yield model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def of_gguf(folder: Path, kind: str, binaries: Path, windows: list[list[int]]) -> float:
    """Perplexity of what llama-quantize makes of the model, computed in bf16 with the codes as they are."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "model"
        copy.symlink_to(folder.resolve())
        with open_source(str(gguf_of(copy, kind, binaries))) as source:
            settings = Settings(dtype="bf16", quant="kept", max_sequences=1, tokens_per_pass=512)
            loaded = load(source, settings, max(map(len, windows)))
            return perplexity((torch.cat(list(predict(loaded.engine, ids))) for ids in windows), windows)


def print_weights(folder: Path, windows: list[list[int]], binaries: Path | None = None) -> None:
    wanted = perplexity(stock(folder, windows), windows)
    print("| arithmetic | weights | bytes of packed weights | perplexity | against transformers fp32 |")
    print("|---|---|---|---|---|")
    print(f"| fp32 | transformers | | {wanted:.4f} | |")
    with open_source(str(folder)) as source:
        for dtype, quant, compute in ROWS:
            job = Workload(1, max(map(len, windows)))
            plan = make_plan(
                source.shape,
                Settings(dtype=dtype, quant=quant, max_sequences=1, compute=compute),
                MemoryBudget(8 << 30),
                job,
            )
            loaded = load_engine(source, plan)
            ours = perplexity((torch.cat(list(predict(loaded.engine, ids))) for ids in windows), windows)
            packed = sum(loaded.shards.packed_nbytes().values())
            arithmetic = "int8 x int8" if compute == "int8" else dtype
            print(f"| {arithmetic} | {quant} | {packed:,} | {ours:.4f} | {ours / wanted - 1:+.3%} |", flush=True)
    if binaries:
        found = of_gguf(folder, "Q4_0", binaries, windows)
        print(f"| bf16 | llama.cpp's Q4_0 | | {found:.4f} | {found / wanted - 1:+.3%} |", flush=True)


# --- KV formats


FORMATS = ("int8", "int8/int4", "int4")
# How much longer than a normalised key of D elements (length sqrt D) the vector is that all keys have in common.
BIAS = 10.0


class BiasedKeys:
    """Adds one vector per layer and head to every key: attention, and so the model, stays the same."""

    def __init__(self, inner: AttentionBackend, bias: dict[int, torch.Tensor]) -> None:
        self._inner = inner
        self._bias = bias

    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any
    ) -> torch.Tensor:
        return self._inner.attend(call, q, k + self._bias[call.layer], v, batch)


class BiasedModel:
    """A loaded model in which whatever computes attention sees biased keys."""

    def __init__(self, loaded: LoadedEngine) -> None:
        object.__setattr__(self, "_model", loaded.model)
        pools = loaded.engine.scheduler.cache.pools
        generator = torch.Generator().manual_seed(0)
        shapes = {layer: (p.spec.group.kv_heads, p.spec.group.head_dim) for p in pools for layer in p.spec.group.layers}
        bias = {layer: BIAS * torch.randn(shape, generator=generator) for layer, shape in shapes.items()}
        object.__setattr__(self, "_bias", bias)
        self.attention = loaded.model.attention

    def __setattr__(self, name: str, backend: Any) -> None:
        self._model.attention = backend if isinstance(backend, BiasedKeys) else BiasedKeys(backend, self._bias)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def load(source: ModelSource, settings: Settings, window: int) -> LoadedEngine:
    return load_engine(source, make_plan(source.shape, settings, MemoryBudget(8 << 30), Workload(1, window)))


def bias_keys(loaded: LoadedEngine, source: ModelSource, with_offsets: bool) -> None:
    """Makes the keys biased, and measures their offsets anew, or takes nothing off them."""
    model: Any = BiasedModel(loaded)
    offsets = measure(model, fixed_token_ids(source.folder))
    for pool in loaded.engine.scheduler.cache.pools:
        if pool.key_transform is not None:
            of_group = offsets.of(pool.spec.group)
            pool.key_transform = KeyTransform(of_group if with_offsets else torch.zeros_like(of_group))


def compare(native: LoadedEngine, other: LoadedEngine, windows: list[list[int]]) -> tuple[float, float, float]:
    """Perplexities, and the mean KL divergence of the other's predictions from the native ones, in nats per token."""
    sums = torch.zeros(3, dtype=torch.float64)
    for token_ids in windows:
        following = torch.tensor([*token_ids[1:], 0])
        for p, q, targets in _together(native, other, token_ids, following):
            chosen = [x.gather(1, targets.unsqueeze(1)).sum() for x in (p, q)]
            sums += torch.stack([*chosen, (p.exp() * (p - q)).sum()])
    count = sum(len(token_ids) - 1 for token_ids in windows)
    return math.exp(-float(sums[0]) / count), math.exp(-float(sums[1]) / count), float(sums[2]) / count


def _together(
    native: LoadedEngine, other: LoadedEngine, token_ids: list[int], following: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    seen = 0
    for p, q in zip(predict(native.engine, token_ids), predict(other.engine, token_ids), strict=True):
        count = min(len(p), len(token_ids) - 1 - seen)
        yield p[:count], q[:count], following[seen : seen + count]
        seen += len(p)


def print_kv(folder: Path, windows: list[list[int]]) -> None:
    window = max(map(len, windows))
    print("| model | weights | KV | bytes per token | perplexity | against native KV | KL, nats per token |")
    print("|---|---|---|---|---|---|---|")
    with open_source(str(folder)) as source:
        cases = [("demo", "none", kv, True) for kv in FORMATS] + [("demo", "nf4", kv, True) for kv in FORMATS]
        cases += [("biased keys", "none", kv, mu) for kv in ("int8", "int4") for mu in (True, False)]
        for name, quant, kv, offsets in cases:
            settings = Settings(dtype="fp32", quant=quant, kv="fp32", max_sequences=1, tokens_per_pass=512)
            native = load(source, settings, window)
            other = load(
                source, Settings(dtype="fp32", quant=quant, kv=kv, max_sequences=1, tokens_per_pass=512), window
            )
            if name != "demo":
                bias_keys(native, source, offsets)
                bias_keys(other, source, offsets)
            exact, quantized, divergence = compare(native, other, windows)
            if kv == FORMATS[0] and offsets:
                print(f"| {name} | {quant} | native | | {exact:.4f} | | |")
            label = kv if offsets else f"{kv} without `mu`"
            nbytes = other.engine.scheduler.cache.token_nbytes
            print(f"| {name} | {quant} | {label} | {nbytes:,.0f} | {quantized:.4f} | {quantized / exact - 1:+.3%} | "
                  f"{divergence:.6f} |", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("weights", "kv"))
    parser.add_argument("--model", type=Path, default=DEMO / "model")
    parser.add_argument("--text", type=Path, default=DEMO / "heldout.txt")
    parser.add_argument("--window", type=int, default=2048, help="tokens that see each other")
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--llama-bin", type=Path, help="where llama-quantize lies")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids = tokenizer.encode(options.text.read_text(), add_special_tokens=False)[: options.tokens]
    print(f"{len(ids):,} tokens in windows of {options.window:,}\n")
    windows = [ids[begin : begin + options.window] for begin in range(0, len(ids), options.window)]
    if options.table == "weights":
        print_weights(options.model, windows, options.llama_bin)
    else:
        print_kv(options.model, windows)


if __name__ == "__main__":
    main()
