"""Ways to spoil a quantized checkpoint. Each says whether what comes out must be refused."""

import json
import random
import struct
from collections.abc import Callable
from typing import Any

from support.hostile.draft import Draft, Part

REFUSE, ACCEPT = "refuse", "accept"
Mutation = Callable[[Draft, random.Random], str | None]
# Tensors without which a weight cannot be computed, by the end of their names.
NEEDED = (
    "weight_scale_inv", "weight_scale", "SCB", "absmax", "quant_map", "nested_absmax", "nested_quant_map", "qzeros",
    "scales", "weight_global_scale", "_scales", "weight_zero_point",
)  # fmt: skip
CODES = ("qweight", "weight_packed", "_blocks")
_SAME_SIZE = {"I32": "F32", "F32": "I32", "F16": "I16", "BF16": "U16", "U8": "I8", "I8": "U8", "F8_E4M3": "F8_E5M2"}
MUTATIONS: dict[str, Mutation] = {}


def mutation(change: Mutation) -> Mutation:
    MUTATIONS[change.__name__] = change
    return change


def _choose(draft: Draft, rng: random.Random, wanted: Callable[[Part], bool]) -> Part | None:
    parts = [part for part in draft.parts if part.layer is not None and wanted(part) and not part.spoiled]
    if not parts:
        return None
    part = rng.choice(parts)
    part.spoiled = True
    return part


def _needed(part: Part) -> bool:
    return part.name.endswith(NEEDED)


@mutation
def a_part_is_missing(draft: Draft, rng: random.Random) -> str | None:
    part = _choose(draft, rng, _needed)
    if part is None:
        return None
    draft.remove(part)
    return REFUSE


@mutation
def the_codes_are_missing(draft: Draft, rng: random.Random) -> str | None:
    part = _choose(draft, rng, lambda part: part.name.endswith(CODES))
    if part is None:
        return None
    draft.remove(part)
    return REFUSE


@mutation
def another_dtype_of_the_same_size(draft: Draft, rng: random.Random) -> str | None:
    part = _choose(draft, rng, lambda part: (_needed(part) or part.name.endswith(CODES)) and part.dtype in _SAME_SIZE)
    if part is None:
        return None
    part.dtype = _SAME_SIZE[part.dtype]
    return REFUSE


@mutation
def another_shape_of_the_same_size(draft: Draft, rng: random.Random) -> str | None:
    part = _choose(
        draft, rng, lambda part: (_needed(part) or part.name.endswith(CODES)) and len(part.shape) >= 2
        and len(set(part.shape[-2:])) == 2 and 1 not in part.shape
    )  # fmt: skip
    if part is None:
        return None
    part.shape = [*part.shape[:-2], *part.shape[:-3:-1]]
    return REFUSE


@mutation
def half_of_a_part(draft: Draft, rng: random.Random) -> str | None:
    part = _choose(draft, rng, lambda part: _needed(part) and bool(part.shape) and part.shape[0] % 2 == 0)
    if part is None:
        return None
    part.shape, part.data = [part.shape[0] // 2, *part.shape[1:]], part.data[: len(part.data) // 2]
    return REFUSE


@mutation
def a_scale_is_not_finite(draft: Draft, rng: random.Random) -> str | None:
    value = rng.choice([float("nan"), float("inf")])
    part = _choose(draft, rng, lambda part: _needed(part) and part.dtype in {"F32", "F16"} and "map" not in part.name)
    if part is None:
        return None
    packed = struct.pack("<f" if part.dtype == "F32" else "<e", value)
    # Every scale of the tensor: single ones may belong to codes that are all zero.
    part.data = packed * (len(part.data) // len(packed))
    return REFUSE


@mutation
def a_float_beside_the_codes(draft: Draft, rng: random.Random) -> str | None:
    part = _choose(draft, rng, lambda part: part.name.endswith((".qweight", ".weight_packed")))
    if part is None:
        return None
    name = part.name.rpartition(".")[0] + ".weight"
    next(iter(draft.files.values())).append(Part(name, "F32", [2, 2], bytes(16), spoiled=True))
    return REFUSE


@mutation
def groups_that_do_not_exist(draft: Draft, rng: random.Random) -> str | None:
    part = _choose(draft, rng, lambda part: part.name.endswith("g_idx"))
    if part is None:
        return None
    first = struct.pack("<i", rng.choice([-1, 10_000, 2**31 - 1, -(2**31)]))
    part.data = first + part.data[4:]
    return REFUSE


@mutation
def another_stated_shape(draft: Draft, rng: random.Random) -> str | None:
    part = _choose(draft, rng, lambda part: part.name.endswith("weight_shape"))
    if part is None:
        return None
    part.data = struct.pack("<qq", *rng.choice([(0, 0), (-1, 128), (1 << 40, 1 << 40), (1 << 30, 1 << 30), (128, 129)]))
    return REFUSE


@mutation
def another_quant_state(draft: Draft, rng: random.Random) -> str | None:
    part = _choose(draft, rng, lambda part: ".quant_state." in part.name)
    if part is None:
        return None
    state = json.loads(part.data)
    changes: list[dict[str, Any]] = [
        {"shape": [1 << 40, 1 << 40]}, {"shape": [128]}, {"shape": "128"}, {"shape": None}, {"blocksize": 0},
        {"blocksize": 63}, {"blocksize": "64"}, {"quant_type": "int4"}, {"nested_blocksize": 7},
        {"nested_offset": "0"}, {"shape": [-1, -1]}, {"blocksize": True},
    ]  # fmt: skip
    text = json.dumps({**state, **rng.choice(changes)}).encode()
    part.data = rng.choice([text, text, text, b"{", b"\xff\xff", b"[" * 2000, b"{}" + b" " * 5000])
    part.shape = [len(part.data)]
    return REFUSE


@mutation
def a_scale_of_activations(draft: Draft, rng: random.Random) -> str | None:
    part = _choose(draft, rng, lambda part: part.name.endswith((*CODES, "q_proj.weight")))
    if part is None:
        return None
    name = part.name.rpartition(".")[0] + rng.choice([".input_scale", ".k_scale", ".output_scale"])
    next(iter(draft.files.values())).append(Part(name, "F32", [1], struct.pack("<f", 0.5), spoiled=True))
    return ACCEPT


_NONSENSE = (-1, 0, 3.5, "4", [], {}, 1 << 40, "x" * 5000, [[]], {"a": {"b": 1}})


@mutation
def a_method_that_nobody_knows(draft: Draft, rng: random.Random) -> str | None:
    config = draft.config["quantization_config"]
    draft.config["quantization_config"] = rng.choice(
        [{**config, "quant_method": value} for value in (*_NONSENSE, "aqlm", "hqq", "torchao")]
        + [[], "gptq", 7, [config]]
    )
    return REFUSE


@mutation
def another_method(draft: Draft, rng: random.Random) -> str | None:
    config = draft.config["quantization_config"]
    others = {"fbgemm_fp8", "gptq", "awq", "mxfp4", "bitsandbytes"} - {config["quant_method"]}
    method = rng.choice(sorted(others))
    if method == "fbgemm_fp8" and (config["quant_method"] == "fp8" or config.get("format") == "float-quantized"):
        # The same tensors, and they mean the same.
        return None
    draft.config["quantization_config"] = {"bits": 4, "group_size": 64, "load_in_4bit": True, "quant_method": method}
    return REFUSE


@mutation
def a_number_of_the_config_is_nonsense(draft: Draft, rng: random.Random) -> str | None:
    config = draft.config["quantization_config"]
    key = rng.choice(["bits", "group_size", "weight_block_size", "load_in_4bit", "checkpoint_format", "config_groups"])
    if key not in config or (key == "load_in_4bit" and config.get("load_in_8bit")):
        return None
    value = rng.choice(_NONSENSE)
    if key == "group_size" and value == -1:
        value = -2
    draft.config["quantization_config"] = {**config, key: value}
    return REFUSE


@mutation
def other_bits_or_groups(draft: Draft, rng: random.Random) -> str | None:
    config = json.loads(json.dumps(draft.config["quantization_config"]))
    groups = config.get("config_groups")
    inner = groups["group_0"]["weights"] if groups else config
    if isinstance(inner.get("group_size"), int) and inner.get("type") != "float":
        inner["group_size"] = 16 if inner["group_size"] != 16 else 32
    elif "weight_block_size" in config:
        config["weight_block_size"] = [32, 32]
    elif inner.get("block_structure"):
        inner["block_structure"] = [32, 32]
    elif groups and inner.get("type") == "int":
        inner["num_bits"] = 5 if "weight_packed" in str([part.name for part in draft.parts]) else 8
        inner["symmetric"] = False
    else:
        return None
    draft.config["quantization_config"] = config
    return REFUSE


@mutation
def a_quantized_module_is_listed_as_not(draft: Draft, rng: random.Random) -> str | None:
    part = _choose(draft, rng, lambda part: part.name.endswith((".qweight", ".weight_packed", ".weight_scale_inv")))
    if part is None:
        return None
    config = draft.config["quantization_config"]
    key = "ignore" if "config_groups" in config else "modules_to_not_convert"
    draft.config["quantization_config"] = {**config, key: [part.name.rpartition(".")[0]]}
    return REFUSE


@mutation
def a_regular_expression_that_runs_for_ever(draft: Draft, rng: random.Random) -> str | None:
    config = draft.config["quantization_config"]
    key = "ignore" if "config_groups" in config else "modules_to_not_convert"
    draft.config["quantization_config"] = {**config, key: ["re:(a+)+(a+)+(a+)+$", "re:(.*)*x"]}
    return ACCEPT


@mutation
def names_that_are_no_names(draft: Draft, rng: random.Random) -> str | None:
    config = draft.config["quantization_config"]
    key = "ignore" if "config_groups" in config else "modules_to_not_convert"
    if config["quant_method"] == "bitsandbytes":
        key = "llm_int8_skip_modules"
    draft.config["quantization_config"] = {**config, key: rng.choice(["x", 7, [7], {"a": 1}, [["x"]]])}
    return REFUSE
