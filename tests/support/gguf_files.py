"""Writes GGUF files of tiny models with `gguf`'s own writer and quantizers, as llama.cpp's converter lays them out."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch

from support.tiny_families import build_model, build_tokenizer

# llama.cpp's name of each family, and what a file of it says beside what all say.
ARCHITECTURES = {
    "gemma2": "gemma2", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss", "llama": "llama", "mixtral": "llama",
    "qwen2": "qwen2", "qwen2_moe": "qwen2moe", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
}  # fmt: skip
# Rows of whole blocks of 256, where K and I formats are written; the files say nothing of windows but gemma's.
SIZES: dict[str, Any] = {"sliding_window": None, "max_window_layers": 99, "use_sliding_window": False}
OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 16}, "gemma3_text": {"sliding_window": 16}, "gpt_oss": {"sliding_window": 16},
    "qwen3_moe": {"norm_topk_prob": True}, "qwen2_moe": {"sliding_window": 4096},
}  # fmt: skip


_SENTENCEPIECE = "tokenizer.model"


def build(family: str, **sizes: Any) -> Any:
    """The stock model of a family's file: what GGUF cannot say of it has the value that its readers assume."""
    if family.startswith("qwen"):
        sizes["layer_types"] = ["full_attention"] * sizes.get("num_hidden_layers", 4)
    return build_model(family, **{**SIZES, **OWN.get(family, {}), **sizes})


def to_gguf(
    model: Any, path: Path, kind: str = "F16", tokenizer: Path | None = None, num_files: int = 1, *,
    factors: bool = False, spoiled: bool = False, copies: int = 1, kinds: Mapping[str, str] = MappingProxyType({}),
) -> Path:  # fmt: skip
    """Writes the model with its matrices in `kind` (a name of gguf's), or by part in `kinds`, the rest in F32; returns
    the first file.

    The model's weights become those that the file means, as gguf's own dequantizers see them.

    The file has `copies` of every expert, which config.num_experts counts. `factors` adds those of Llama 3's rotary
    frequencies, `spoiled` ones of another kind. `tokenizer` is a folder whose byte-level vocabulary and template go
    into the file.
    """
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    each = -(-len(_tensors(model)) // num_files) if num_files > 1 else 0
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=each)
    _metadata(writer, config, arch)
    if tokenizer is not None:
        (_pieces if (tokenizer / _SENTENCEPIECE).is_file() else _vocabulary)(writer, tokenizer)
    if factors:
        writer.add_tensor("rope_freqs.weight", _frequencies(model) * (1.5 if spoiled else 1.0))
    for name, tensor, put in _tensors(model):
        data = tensor.detach().float().contiguous().numpy()
        own = gguf.GGMLQuantizationType[kinds.get(name.split(".")[-2], kind)]
        block = gguf.GGML_QUANT_SIZES[own][0]
        if not name.endswith(".weight") or data.ndim < 2 or "ffn_gate_inp" in name or data.shape[-1] % block:
            own = gguf.GGMLQuantizationType.F32
        blocks = blocks_of(data, own)
        many = np.tile(blocks, (copies, *[1] * (blocks.ndim - 1))) if _is_by_expert(name) else blocks
        writer.add_tensor(name, many, raw_dtype=own)
        put(torch.from_numpy(gguf.quants.dequantize(blocks, own).reshape(data.shape).copy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if num_files == 1 else sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf"))[0]


def _is_by_expert(name: str) -> bool:
    return "_exps." in name or "ffn_gate_inp." in name


def _frequencies(model: Any) -> np.ndarray:
    """What frequencies are divided by, from transformers' own table."""
    rotary = model.model.rotary_emb
    count = len(rotary.inv_freq)
    plain = model.config.rope_parameters["rope_theta"] ** (-torch.arange(count) / count)
    factors: np.ndarray = (plain / rotary.inv_freq).float().numpy()
    return factors


def blocks_of(data: np.ndarray, kind: Any) -> np.ndarray:
    """Floats in a type of gguf's; random valid blocks where it only dequantizes that."""
    try:
        return np.ascontiguousarray(gguf.quants.quantize(data, kind))
    except NotImplementedError:
        return _random_blocks(data.shape, kind)


def _random_blocks(shape: tuple[int, ...], kind: Any) -> np.ndarray:
    """Any codes are valid; the float16 factors of a block are small and finite."""
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(int(np.prod(shape)))
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // block, nbytes), dtype=np.uint8)
    factor = np.frombuffer(np.float16(0.003).tobytes(), np.uint8)
    for begin in _FACTORS[kind.name]:
        blocks[..., begin : begin + 2] = factor
    return blocks.reshape(*shape[:-1], -1)


# Where a block of each type has its factors.
_FACTORS = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "IQ2_XXS": (0,), "IQ3_S": (0,),
}  # fmt: skip


def _metadata(writer: Any, config: Any, arch: str) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if count:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _vocabulary(writer: Any, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    special = set(tokenizer.all_special_tokens) | {"<|im_start|>", "<|im_end|>", "<s>"}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def _pieces(writer: Any, folder: Path) -> None:
    """SentencePiece's: every piece with its score and type, no merges (llama.cpp, conversion/base.py)."""
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_file=str(folder / _SENTENCEPIECE))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    added = {int(index): token["content"] for index, token in config["added_tokens_decoder"].items()}
    ids = range(model.vocab_size())
    types = ((model.IsUnknown, 2), (model.IsControl, 3), (model.IsUnused, 5), (model.IsByte, 6))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([added.get(index, model.IdToPiece(index)) for index in ids])
    writer.add_token_scores([-1000.0 if index in added else model.GetScore(index) for index in ids])
    writer.add_token_types(
        [4 if index in added else next((kind for test, kind in types if test(index)), 1) for index in ids]
    )
    writer.add_bos_token_id(model.bos_id())
    writer.add_eos_token_id(model.eos_id())
    writer.add_unk_token_id(model.unk_id())
    writer.add_add_bos_token(config["add_bos_token"])
    writer.add_chat_template(config["chat_template"])
    if "add_prefix_space" in config:
        writer.add_add_space_prefix(config["add_prefix_space"])


# A name, a tensor as the file has it, and what puts such a tensor back where it comes from.
Written = tuple[str, torch.Tensor, Callable[[torch.Tensor], object]]


def _tensors(model: Any) -> list[Written]:
    found = []
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not tied:
            found += _written(name, tensor, model.config)
    return found


_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def _written(name: str, tensor: torch.Tensor, config: Any) -> list[Written]:
    """The tensors of llama.cpp's converter that one of transformers' module becomes."""
    gemma = config.model_type.startswith("gemma")
    plus = 1.0 if gemma and "norm" in name else 0.0
    module, _, kind = name.rpartition(".")
    if module in _OUTER:
        return [(f"{_OUTER[module]}.{kind}", tensor + plus, lambda read: tensor.copy_(read - plus))]
    index, _, part = module.removeprefix("model.layers.").partition(".")
    block = f"blk.{index}"
    if part.endswith("experts"):
        return _experts(f"{block}.ffn_", kind, tensor, config)
    if kind == "sinks":
        return [(f"{block}.attn_sinks.weight", tensor, tensor.copy_)]
    if config.model_type in ("llama", "mixtral") and part in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config.num_attention_heads if "q_proj" in part else config.num_key_value_heads
        wanted = f"{block}.{_PARTS[part]}.{kind}"
        return [(wanted, _permuted(tensor, heads), lambda read: tensor.copy_(_unpermuted(read, heads)))]
    own = _PARTS.get(part, "ffn_norm")
    if part == "post_attention_layernorm" and (gemma or config.model_type == "gpt_oss"):
        own = "post_attention_norm"
    return [(f"{block}.{own}.{kind}", tensor + plus, lambda read: tensor.copy_(read - plus))]


def _permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """convert_hf_to_gguf.py, LlamaModel.permute."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _unpermuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    order = _permuted(torch.arange(len(weight)), heads)
    return torch.empty_like(weight).index_copy_(0, order, weight)


def _experts(prefix: str, kind: str, tensor: torch.Tensor, config: Any) -> list[Written]:
    ending = "bias" if kind.endswith("bias") else "weight"
    transposed = config.model_type == "gpt_oss" and ending == "weight"
    rows = tensor.transpose(1, 2) if transposed else tensor
    if kind.startswith("down"):
        return [(f"{prefix}down_exps.{ending}", rows, rows.copy_)]
    pairs = (rows[:, 0::2], rows[:, 1::2]) if config.model_type == "gpt_oss" else rows.chunk(2, 1)
    return [(f"{prefix}{side}_exps.{ending}", one, one.copy_) for side, one in zip(("gate", "up"), pairs, strict=True)]


def save_tokenizer(folder: Path, vocab_size: int) -> Path:
    """A byte-level tokenizer with one merge, as those that GGUF files have cannot be without."""
    folder.mkdir(exist_ok=True)
    build_tokenizer(folder, vocab_size)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["he"] = vocab.pop(f"Ġ{vocab_size - 1}")
    content["model"]["merges"] = [["h", "e"]]
    path.write_text(json.dumps(content))
    return folder


def save_sentencepiece(folder: Path, vocab_size: int, *, family: str = "Llama", prefix: bool | None = None) -> Path:
    """A folder with SentencePiece's own model alone, trained on this file: BPE that falls back to bytes.

    `prefix` is whether a text gets a space before it, where the configuration says so at all.
    """
    from sentencepiece import SentencePieceTrainer

    folder.mkdir(exist_ok=True)
    with (folder / _SENTENCEPIECE).open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter(Path(__file__).read_text().splitlines()), model_writer=file, model_type="bpe",
            vocab_size=vocab_size, byte_fallback=True, split_digits=True, allow_whitespace_only_pieces=True,
            normalization_rule_name="identity", remove_extra_whitespaces=False, num_threads=1, minloglevel=2,
            add_dummy_prefix=family == "Llama" and prefix is not False, user_defined_symbols=["<think>"],
        )  # fmt: skip
    values = {
        "tokenizer_class": f"{family}Tokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>",
        "unk_token": "<unk>", "added_tokens_decoder": {"3": {"content": "<think>", "special": False}},
        "chat_template": "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}",
    }  # fmt: skip
    if prefix is not None:
        values["add_prefix_space"] = prefix
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder
