"""What is compiled: launches of published shapes, and a pairwise cover of what a plan may ask for. Imports Triton."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from matrix.compiling.pairwise import pairwise
from moedge.quant.formats.format import get_format
from moedge.quant.kernels.operands import Gate
from moedge.quant.kernels.product import GroupedProduct, Launch
from moedge.quant.kernels.tuning import TILE_ROWS, supports
from moedge.quant.tensor import PackedTensor, torch_dtype
from moedge.runtime.attention.kernels.launch import attend_launches, store_launch
from moedge.runtime.attention.kernels.operands import decode_cut, extend_cut, has_dot
from support.kernels import paged_cases
from support.known_shapes import CONFIGS

ROOT = Path(__file__).parents[3]
DTYPES = ("bfloat16", "float16", "float32")
WORDS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
KV = (("native", "native"), ("int8", "int8"), ("int8", "int4"), ("int4", "int4"))
BLOCKS = (4, 8, 16, 32)
GATES = {
    "no gate": None,
    "silu": Gate("silu"),
    "gelu_tanh": Gate("gelu_tanh"),
    "clamped pairs": Gate("clamped_swiglu", alternating=True),
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 128},
    "chunk": {"chunk": 8192},
    "softcap": {"softcap": 50.0},
    "sinks": {"sinks": True, "window": 333},
    "all": {"window": 4096, "softcap": 30.0, "sinks": True, "shift": True},
}
HEADS = (64, 80, 96, 128, 192, 256)
GROUPS = (1, 4, 5, 8, 16)
STORED_HEADS = (64, 80, 128, 256)
EXPERTS = ((256, 128), (1536, 2048), (2880, 2880))
PUBLISHED_FORMATS = (
    ("int4", 16), ("int4", 64), ("nf4", 16), ("nf4", 64), ("int8", 16), ("mxfp4", 16), ("mxfp4", 32),
    ("int3", 16), ("int3", 32), ("int3", 64), ("vq2", 16), ("vq2", 32), ("vq2", 64),
)  # fmt: skip
LENGTHS = ((63, 1), (20, 1))


@dataclass(frozen=True)
class Subject:
    """A kernel with one set of sizes. `hot` ones decide what a pass takes, `dots` use tensor cores for 16-bit numbers;
    `line` is what runs of codes are multiples of, in bytes.
    """

    kernel: str
    config: str
    hot: bool
    dots: bool
    line: int
    launch: Callable[[], Launch]

    @property
    def reads(self) -> bool:
        """Whether the kernel loads codes of weights, of keys or of values."""
        return self.kernel not in {"merge", "store"}

    @property
    def name(self) -> str:
        return f"{self.kernel}, {self.config}"


def subjects(arch: int) -> list[Subject]:
    """All for one architecture, each once."""
    capability = (arch // 10, arch % 10)
    found = [*attention_subjects(capability), *expert_subjects(capability)]
    return list({subject.name: subject for subject in found}.values())


def quick(arch: int) -> list[Subject]:
    """One or two launches of each kernel, of those in `subjects`."""
    wanted = {
        ("decode", "bf16 head 128 group 8 block 32 int8/int8 plain"),
        ("split decode", "bf16 head 128 group 8 block 32 native/native plain"),
        ("extend", "bf16 head 128 group 8 block 32 native/native plain"),
        ("merge", "bf16 head 128"),
        ("store", "bf16 head 128 block 32 int4/int4"),
        ("gate and up", "bf16 nf4 1536x2048 silu 16 rows"),
        ("down", "bf16 int8 2048x768 16 rows"),
        ("gate and up", "bf16 mxfp4 5760x2880 clamped pairs bias 16 rows"),
        ("down", "bf16 mxfp4 2880x2880 bias 32 rows"),
    }
    found = [subject for subject in subjects(arch) if (subject.kernel, subject.config) in wanted]
    assert len(found) == len(wanted), "a launch of the short list is not in the long one"
    return found


# --- attention


def published_heads() -> list[tuple[int, int]]:
    """(head size, query heads a KV head) of the families' published configs."""
    table = json.loads((ROOT / "runtime" / "shape" / "defaults.json").read_text())
    configs = [entry["defaults"] for entry in table.values()] + list(CONFIGS.values())
    found = set()
    for config in configs:
        if config.get("kv_lora_rank"):
            # Latent attention has no kernels.
            continue
        heads = config.get("num_attention_heads")
        size = config.get("head_dim") or (config["hidden_size"] // heads if heads else 0)
        # A default of a config class that no checkpoint has is no published shape.
        if size and size % 16 == 0:
            found.add((size, heads // (config.get("num_key_value_heads") or heads)))
    return sorted(found)


def attention_subjects(capability: tuple[int, int]) -> Iterator[Subject]:
    half = "bfloat16" if has_dot(capability) else "float16"
    kernels = ("decode", "split decode", "extend") if has_dot(capability) else ("decode", "split decode")
    base = {"dtype": half, "block": 32, "kv": KV[0], "features": "plain"}
    published = published_heads()
    for head, group in published:
        yield attention(capability, base | {"kernel": "split decode", "head": head, "group": group})
    for head, group in dict(published).items():
        yield merge(capability, half, head)
        if "extend" in kernels:
            yield attention(capability, base | {"kernel": "extend", "head": head, "group": group})
    factors = {
        "kernel": kernels, "head": HEADS, "group": GROUPS, "kv": KV, "block": BLOCKS, "features": tuple(FEATURES),
        "dtype": DTYPES,
    }  # fmt: skip
    for row in pairwise(factors):
        yield attention(capability, row)
    for row in pairwise({"head": STORED_HEADS, "kv": KV, "block": BLOCKS, "dtype": DTYPES}):
        yield store(row)
    # What is compiled at each change.
    yield attention(capability, base | {"kernel": "decode", "head": 128, "group": 8, "kv": KV[1]})
    if "extend" in kernels:
        yield attention(capability, base | {"kernel": "extend", "head": 128, "group": 8})
    yield store(base | {"head": 128, "kv": KV[3]})


def attention(capability: tuple[int, int], row: dict[str, Any]) -> Subject:
    dtype, (keys, values), head = torch_dtype(row["dtype"]), row["kv"], row["head"]
    case = paged_cases.Case(
        keys, values, head, row["group"], row["block"], lengths=LENGTHS, dtype=dtype, native=dtype,
        **FEATURES[row["features"]],
    )  # fmt: skip
    wide = dtype == torch.float32
    kind = paged_cases.kind_of(keys, values)
    sizes = (head, row["group"], wide)
    extends = row["kernel"] == "extend"
    cut = extend_cut(*sizes, keys != values) if extends else decode_cut(capability, *sizes, kind)
    config = (
        f"{WORDS[row['dtype']]} head {head} group {row['group']} block {row['block']} {keys}/{values} {row['features']}"
    )
    # Below sm80 plans compute in float16.
    hot = row["kernel"] != "extend" and head <= 128 and not wide and (cut.dot or row["dtype"] == "float16")
    line = min(code_nbytes(head, kind, dtype) for kind in row["kv"])
    splits = 4 if row["kernel"] == "split decode" else 1
    return Subject(row["kernel"], config, hot, cut.dot and not wide, line, lambda: _attend(case, cut, splits)[0])


def code_nbytes(head: int, kind: str, dtype: torch.dtype) -> int:
    """What a token's codes of one head are multiples of, in bytes."""
    nbytes = {"native": head * dtype.itemsize, "int8": head, "int4": head // 2}[kind]
    return nbytes & -nbytes


def merge(capability: tuple[int, int], dtype: str, head: int) -> Subject:
    case = paged_cases.Case(
        "int8", "int8", head, 4, 32, lengths=LENGTHS, dtype=torch_dtype(dtype), native=torch_dtype(dtype)
    )
    cut = decode_cut(capability, head, 4, wide=False, kind="int8")
    return Subject("merge", f"{WORDS[dtype]} head {head}", False, False, 16, lambda: _attend(case, cut, 4)[1])


def store(row: dict[str, Any]) -> Subject:
    dtype, (keys, values) = torch_dtype(row["dtype"]), row["kv"]
    case = paged_cases.Case(keys, values, row["head"], 4, row["block"], lengths=LENGTHS, dtype=dtype, native=dtype)
    config = f"{WORDS[row['dtype']]} head {row['head']} block {row['block']} {keys}/{values}"
    return Subject("store", config, False, False, 16, lambda: _store(case))


def _attend(case: paged_cases.Case, cut: Any, splits: int) -> list[Launch]:
    cache = paged_cases.Cache.make(case)
    # As a pool makes them that rotates the keys which it codes.
    q = cache.q if case.keys == "native" else cache.q.float()
    return attend_launches(q, cache.out, cache.cached, cache.pages(1), cache.features, cut, splits)


def _store(case: paged_cases.Case) -> Launch:
    cache = paged_cases.Cache.make(case)
    x = cache.q[:, : case.kv_heads]
    k = x if case.keys == "native" else x.float()
    return store_launch(k, x, cache.cached, torch.zeros(len(x), dtype=torch.int64))


# --- experts


def expert_subjects(capability: tuple[int, int]) -> Iterator[Subject]:
    if not supports(capability):
        return
    for config in CONFIGS.values():
        hidden, inner = config["hidden_size"], config.get("moe_intermediate_size", config["intermediate_size"])
        pairs = config["model_type"] == "gpt_oss"
        up = {"gate": "clamped pairs" if pairs else "silu", "shape": (2 * inner, hidden)}
        for row in (up, {"gate": "no gate", "shape": (hidden, inner)}):
            for format_name, rows in PUBLISHED_FORMATS:
                yield experts(row | {"format": format_name, "rows": rows, "dtype": "bfloat16", "bias": pairs})
    for format_name in ("int8", "int4", "nf4", "mxfp4"):
        # Keys and values of a dense model, which leave most processors idle.
        row = {"gate": "no gate", "shape": (1024, 4096), "format": format_name, "rows": 16, "bias": False}
        yield experts(row | {"dtype": "bfloat16", "alone": True})
    for format_name in ("int3", "vq2"):
        row = {"gate": "silu", "shape": (1536, 2048), "format": format_name, "rows": 64, "bias": False}
        yield experts(row | {"dtype": "float16"})
    factors = {
        "gate": tuple(GATES), "shape": EXPERTS, "format": ("none", "int8", "nf4"), "rows": TILE_ROWS, "dtype": DTYPES,
        "bias": (False, True),
    }  # fmt: skip
    # float32 has one tile for all.
    for row in pairwise(factors, lambda row: row["dtype"] != "float32" or row["rows"] == TILE_ROWS[0]):
        yield experts(row)


def experts(row: dict[str, Any]) -> Subject:
    kernel = "down" if row["gate"] == "no gate" else "gate and up"
    words = [WORDS[row["dtype"]], row["format"], "x".join(map(str, row["shape"]))]
    words += [row["gate"]] * (kernel != "down") + ["bias"] * row["bias"] + ["alone"] * row.get("alone", False)
    wide = row["dtype"] == "float32"
    config = f"{' '.join(words)} {row['rows']} rows"
    codes = get_format(row["format"]).layout(row["shape"], row["dtype"]).planes[0].nbytes // row["shape"][0]
    return Subject(kernel, config, row["rows"] <= 32 and not wide, not wide, codes & -codes, lambda: _product(row))


def _product(row: dict[str, Any]) -> Launch:
    """On memory that is never written, so that it takes none."""
    (num_rows, num_columns), gate, rows = row["shape"], GATES[row["gate"]], row["rows"]
    layout = get_format(row["format"]).layout(row["shape"], row["dtype"])
    raw = torch.empty(layout.nbytes + 64, dtype=torch.uint8)
    begin = -raw.data_ptr() % 64
    matrix = PackedTensor.bind(layout, raw[begin : begin + layout.nbytes])
    dtype = torch_dtype(row["dtype"])
    x = torch.empty(rows, num_columns, dtype=dtype)
    out = torch.empty(rows, num_rows // 2 if gate else num_rows, dtype=dtype)
    token_ids = torch.zeros(rows, dtype=torch.int64) if gate else None
    product = GroupedProduct("cpu")
    if row.get("alone"):
        product.processors = num_rows
        return product.multiply(x, matrix, out)
    cut = product.rows([slice(0, rows)], x)
    biases = [torch.empty(num_rows, dtype=dtype)] if row["bias"] else [None]
    return product.launch(x, out, [matrix], biases, cut, token_ids, gate)
