"""Measures the model: perplexity of held-out text, use of each expert, sample answers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast

PROMPTS = (
    "Tell of the sea.",
    "Continue: In the beginning",
    "Write about bread and wine.",
    "Tell of Moses.",
    "What is said of wisdom?",
    "Speak of a king and the sword.",
)


@dataclass(frozen=True)
class LayerRouting:
    """One layer's routing over some text.

    use: share of all choices per expert, sums to 1.
    token_entropy: mean entropy of one token's expert distribution, in bits; low means decided routers.
    use_entropy: entropy of the mean distribution, in bits; log2(num_experts) means even use.
    """

    use: list[float]
    token_entropy: float
    use_entropy: float


@torch.inference_mode()
def perplexity(model: PreTrainedModel, ids: Tensor, num_tokens: int) -> float:
    """Per-token perplexity of `ids` [n] in windows of `num_tokens`, each read from its own beginning."""
    total, count = 0.0, 0
    for window in torch.split(ids, num_tokens):
        logits = model(input_ids=window[None], use_cache=False, output_router_logits=False).logits[0, :-1]
        total += F.cross_entropy(logits.float(), window[1:], reduction="sum").item()
        count += len(window) - 1
    return math.exp(total / count)


@torch.inference_mode()
def routing(model: PreTrainedModel, ids: Tensor, num_tokens: int) -> list[LayerRouting]:
    """Each layer's routing over `ids` [n], read in windows of `num_tokens`."""
    windows = [
        model(input_ids=window[None], use_cache=False, output_router_logits=True).router_logits
        for window in torch.split(ids, num_tokens)
    ]
    layers = [torch.cat(layer).float() for layer in zip(*windows, strict=True)]
    return [_layer_routing(logits, model.config.num_experts_per_tok) for logits in layers]


def _layer_routing(logits: Tensor, experts_per_token: int) -> LayerRouting:
    chosen = logits.topk(experts_per_token, dim=-1).indices.flatten()
    use = torch.bincount(chosen, minlength=logits.shape[-1]) / len(chosen)
    probabilities = logits.softmax(-1)
    return LayerRouting(
        use=[round(share, 4) for share in use.tolist()],
        token_entropy=round(_entropy(probabilities).mean().item(), 3),
        use_entropy=round(_entropy(use).item(), 3),
    )


def _entropy(probabilities: Tensor) -> Tensor:
    nats: Tensor = torch.special.entr(probabilities).sum(-1)
    return nats / math.log(2)


@torch.inference_mode()
def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str] = PROMPTS
) -> dict[str, str]:
    """A sampled answer to each prompt (temperature 0.7, top-p 0.9, seed 0)."""
    torch.manual_seed(0)
    written: dict[str, str] = {}
    for prompt in prompts:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        ids = model.generate(**inputs, max_new_tokens=200, do_sample=True, temperature=0.7, top_p=0.9, top_k=0)
        written[prompt] = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return written
