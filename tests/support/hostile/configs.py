"""Ways to spoil config.json, each of which knows whether what comes out must be refused."""

import json
import random
from collections.abc import Callable
from typing import Any

from support.hostile.draft import Draft
from support.hostile.mutations import ACCEPT, REFUSE, mutation, of_each

SIZES = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads", "num_key_value_heads",
    "num_hidden_layers", "num_experts", "num_local_experts", "vocab_size", "head_dim",
)  # fmt: skip
NUMBERS = (*SIZES, "max_position_embeddings", "num_experts_per_tok", "rms_norm_eps")


def sizes_of(draft: Draft, names: tuple[str, ...]) -> list[str]:
    """The sizes that the file gives and the family uses."""
    unused = {"intermediate_size"} if draft.config.get("model_type") == "qwen3_moe" else set()
    return [name for name in names if type(draft.config.get(name)) in {int, float} and name not in unused]


def another_size(draft: Draft, rng: random.Random, change: Callable[[int], int]) -> str | None:
    names = sizes_of(draft, SIZES)
    if not names:
        return None
    name = rng.choice(names)
    draft.config[name] = change(int(draft.config[name]))
    return REFUSE


of_each(
    {
        "one more": lambda size: size + 1,
        "one less": lambda size: size - 1,
        "doubled": lambda size: size * 2,
        "zero": lambda size: 0,
        "negative": lambda size: -size,
        "billions": lambda size: 10**9,
        "beyond 64 bit": lambda size: 2**70,
    },
    another_size,
    "size",
)


def no_number(draft: Draft, rng: random.Random, value: Any) -> str | None:
    names = sizes_of(draft, NUMBERS)
    if not names:
        return None
    draft.config[rng.choice(names)] = value
    return REFUSE


of_each(
    {
        "a text": "64",
        "a list": [64],
        "an object": {"size": 64},
        "true": True,
        "a fraction": 64.5,
        "NaN": float("nan"),
        "infinity": float("inf"),
        "a command": "__import__('os').system('id')",
    },
    no_number,
    "number",
)


def with_key(draft: Draft, rng: random.Random, made: tuple[dict[str, Any], str]) -> str | None:
    values, verdict = made
    # What another mutation already changed stays as that one judged it.
    if any(name in draft.config and isinstance(draft.config[name], dict) for name in values) and verdict == ACCEPT:
        return None
    draft.config.update(values)
    return verdict


of_each(
    {
        "auto_map": ({"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}, ACCEPT),
        "auto_map of anything": ({"auto_map": [{"evil": ["modeling_evil.Evil", None, 7]}]}, ACCEPT),
        "auto_map inside": ({"a": {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}}, REFUSE),
        "attention implementation": ({"_attn_implementation": "evil/kernel"}, REFUSE),
        "experts implementation": ({"experts_implementation": "evil"}, REFUSE),
        "inner implementation": ({"text_config": {"attn_implementation": "evil/repo"}}, REFUSE),
        "a private key": ({"_evil": {"a": 1}}, REFUSE),
        "trust": ({"trust_remote_code": True}, REFUSE),
        "pipelines": ({"custom_pipelines": {"x": {"impl": "evil.X"}}}, REFUSE),
        "a kernel": ({"hub_kernel_config": "evil/kernel"}, REFUSE),
        "a kernel deep inside": ({"a": [{"b": [{"use_kernels": "evil"}]}]}, REFUSE),
        "quantized": ({"quantization_config": {"quant_method": "gptq"}}, REFUSE),
        "quantized by a list": ({"quantization_config": [[]]}, REFUSE),
        "an activation that is not": ({"hidden_act": "os.system", "hidden_activation": "os.system"}, REFUSE),
        "an activation that is a list": ({"hidden_act": ["silu"]}, REFUSE),
        "another family": ({"model_type": "mamba"}, REFUSE),
        "a family of code": ({"model_type": "../evil"}, REFUSE),
        "a family of numbers": ({"model_type": 7}, REFUSE),
        "no family": ({"model_type": None}, REFUSE),
        "deep": ({"x": json.loads("[" * 60 + "]" * 60)}, REFUSE),
        "layer kinds": ({"layer_types": ["full_attention"]}, REFUSE),
        "layer kinds of code": ({"layer_types": "full_attention"}, REFUSE),
        "layer kinds of lists": ({"layer_types": [["full_attention"]] * 3}, REFUSE),
        "both directions": ({"use_bidirectional_attention": True}, REFUSE),
        "a negative window": ({"sliding_window": -4}, REFUSE),
        "a padding beyond the vocabulary": ({"pad_token_id": 10**5}, REFUSE),
        "a padding of text": ({"pad_token_id": "0"}, REFUSE),
        "too many experts a token": ({"num_experts_per_tok": 500, "num_local_experts": 4}, REFUSE),
        "two counts of experts": ({"num_experts": 8, "num_local_experts": 4}, REFUSE),
        "rope a list": ({"rope_scaling": [1]}, REFUSE),
        "rope of code": ({"rope_scaling": {"rope_type": "evil"}}, REFUSE),
        "rope that depends on neighbours": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, REFUSE),
        "rope without its factor": ({"rope_parameters": None, "rope_scaling": {"rope_type": "linear"}}, REFUSE),
        "rope of a negative factor": ({"rope_scaling": {"type": "linear", "factor": -2}}, REFUSE),
        "rope of a kind of lists": ({"rope_parameters": {"rope_type": ["yarn"]}}, REFUSE),
        "rope of base one": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1}}, REFUSE),
        "rope of base text": ({"rope_theta": "big"}, REFUSE),
        "an epsilon of zero": ({"rms_norm_eps": 0}, REFUSE),
        "a flag of text": ({"tie_word_embeddings": "no"}, REFUSE),
        "a flag of numbers": ({"attention_bias": 1}, REFUSE),
        "labels by the billion": ({"num_labels": 10**9}, ACCEPT),
        "labels of code": ({"id2label": {"0": "__import__('os')"}, "label2id": "x"}, ACCEPT),
        "pruned heads": ({"pruned_heads": {"0": [0, 1]}}, ACCEPT),
        "chunks": ({"chunk_size_feed_forward": -1}, ACCEPT),
        "two languages": ({"is_encoder_decoder": True, "add_cross_attention": True}, ACCEPT),
        "outputs": ({"output_attentions": True, "output_hidden_states": True, "return_dict": False}, ACCEPT),
        "a dtype of code": ({"dtype": "evil", "torch_dtype": {"a": 1}}, ACCEPT),
        "an architecture": ({"architectures": ["../Evil"]}, ACCEPT),
        "a repository": ({"_name_or_path": "evil/repo"}, ACCEPT),
        "a version": ({"transformers_version": "99.0"}, ACCEPT),
        "an initializer": ({"initializer_range": -1e300}, ACCEPT),
        "unknown texts": ({"\ud800 evil": "\ud800", "task_specific_params": {"x": "\x1b[2J"}}, ACCEPT),
        "many unknown keys": ({f"key{i}": i for i in range(5000)}, ACCEPT),
        "tokens": ({"bos_token_id": 5, "eos_token_id": [2, 7]}, ACCEPT),
    },
    with_key,
    "config",
)  # fmt: skip


@mutation
def fewer_experts_a_token(draft: Draft, rng: random.Random) -> str | None:
    """One expert less a token is another model, but no header can tell."""
    if draft.config.get("num_experts_per_tok") != 2:
        return None
    draft.config["num_experts_per_tok"] = 1
    return ACCEPT


@mutation
def untied(draft: Draft, rng: random.Random) -> str | None:
    if draft.config.get("tie_word_embeddings") is not True:
        return None
    draft.config["tie_word_embeddings"] = False
    return REFUSE


@mutation
def tied_with_a_head(draft: Draft, rng: random.Random) -> str | None:
    """Some tied checkpoints write the head out; transformers reads the embedding then, and so do we."""
    if draft.config.get("tie_word_embeddings") is not False or not any(p.name == "lm_head.weight" for p in draft.parts):
        return None
    draft.config["tie_word_embeddings"] = True
    return ACCEPT


@mutation
def biased(draft: Draft, rng: random.Random) -> str | None:
    """The flag says that there are biases, or that there are none, and the files say the opposite."""
    if type(draft.config.get("attention_bias")) is not bool:
        return None
    draft.config["attention_bias"] = not any(part.name.endswith("q_proj.bias") for part in draft.parts)
    return REFUSE


def text(draft: Draft, rng: random.Random, made: tuple[Callable[[bytes], bytes], str]) -> str:
    draft.config_text.append(made[0])
    return made[1]


of_each(
    {
        "a BOM": (lambda text: b"\xef\xbb\xbf" + text, REFUSE),
        "not UTF-8": (lambda text: text.replace(b'"', b'"\xff', 1), REFUSE),
        "cut": (lambda text: text[: len(text) // 2], REFUSE),
        "empty": (lambda text: b"", REFUSE),
        "a list": (lambda text: b"[" + text + b"]", REFUSE),
        "a key twice": (lambda text: b'{"hidden_size":1,"hidden_size":64,' + text[1:], REFUSE),
        "an inner key twice": (lambda text: b'{"x":{"a":1,"a":2},' + text[1:], REFUSE),
        "a constant": (lambda text: b'{"x":-Infinity,' + text[1:], REFUSE),
        "a long number": (lambda text: b'{"x":' + b"9" * 5000 + b"," + text[1:], REFUSE),
        "very deep": (lambda text: b'{"x":' + b"[" * 10**6 + b"]" * 10**6 + b"," + text[1:], REFUSE),
        "too large": (lambda text: b'{"x":"' + b"x" * (2 << 20) + b'",' + text[1:], REFUSE),
        "large": (lambda text: b'{"x":"' + b"x" * (900 << 10) + b'",' + text[1:], ACCEPT),
        "spaced": (lambda text: b" \n" + text + b"\n\n", ACCEPT),
    },
    text,
    "config text",
)  # fmt: skip
