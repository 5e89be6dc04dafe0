"""Tiny random checkpoints of every supported family, and the stock models that judge ours."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# As the command line does, before torch is loaded: spinning threads make tests on a busy machine ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

MOE = {"num_experts_per_tok": 2}
# What makes each family's features occur: windows shorter than the prompts, several layers, more experts than used.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**MOE, "num_experts": 8, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "mixtral": {**MOE, "num_local_experts": 4, "sliding_window": 24},
    "olmoe": {**MOE, "num_experts": 8, "num_key_value_heads": 4},
    "gpt_oss": {**MOE, "num_local_experts": 8, "sliding_window": 16, "layer_types": None},
    "granitemoe": {
        **MOE, "num_local_experts": 4, "logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0,
        "attention_multiplier": 0.2, "tie_word_embeddings": True,
    },
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 16, "num_hidden_layers": 7, "query_pre_attn_scalar": 32, "pad_token_id": 0},
}  # fmt: skip
SHAPE = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 384, "max_position_embeddings": 512,
    "bos_token_id": None, "eos_token_id": 2,
}  # fmt: skip


def build_model(family: str) -> Any:
    """A stock transformers model with random weights, as spread out as a trained one: greedy tokens vary."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    settings = {name: value for name, value in {**SHAPE, **FAMILIES[family]}.items() if value is not None}
    if family in {"llama", "mixtral", "olmoe", "granitemoe"}:
        settings.pop("head_dim")
    config = CONFIG_MAPPING[family](**settings)
    torch.manual_seed(sum(map(ord, family)))
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.dim() > 1 else 0.1
            if "bias" in name or parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * spread)
        if config.tie_word_embeddings:
            # A tied head otherwise repeats the last token for ever.
            model.get_input_embeddings().weight.mul_(0.1)
    return model


def build_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer whose every id decodes, with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: index for index, token in enumerate([*special, *alphabet])}
    while len(vocab) < vocab_size:
        vocab[f"Ġ{len(vocab)}"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast.save_pretrained(folder)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint(family)` is the folder of a tiny random checkpoint, made once a session."""

    @functools.cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        model = build_model(family)
        model.save_pretrained(folder)
        build_tokenizer(folder, model.config.vocab_size)
        return folder

    return make


@pytest.fixture(scope="session")
def stock() -> Callable[[Path], Any]:
    """`stock(folder)` is transformers' own model of a checkpoint, in fp32."""

    @functools.cache
    def load(folder: Path) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    return load


@pytest.fixture(autouse=True, scope="session")
def _two_threads() -> None:
    torch.set_num_threads(2)
