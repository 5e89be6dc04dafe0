"""What a case ought to give: transformers' own model with the weights that a format means, and rounded activations."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from moedge.quant.formats.format import get_format
from moedge.quant.tensor import pack_into
from moedge.runtime.shape.shards import TIED_HEAD
from support.real.measure import Found
from support.real.rotation import unpacked
from support.real.text import ANSWER, QUESTIONS, windows

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Columns that share a scale where activations are rounded to int8.
COLUMNS = 32


class Stock:
    """transformers' model of a checkpoint, a folder or SmolLM2's GGUF file, in float32, and its tokenizer."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = unpacked() if model.is_file() else model
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        head = self.model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
        self._linears = [(name, module) for name, module in self.model.named_modules() if isinstance(module, nn.Linear)]
        # As the file has them: a definition in bf16 rounds the embedding and the norms too.
        self._parameters = {name: each.detach().clone() for name, each in self.model.named_parameters()}

    def define(self, quant: str, compute: str, packed_from: str, dtype: str) -> Definition:
        """The model in `dtype` with weights packed in `quant` from `packed_from`, the dtype that a job has.

        Frequencies of positions, which are no parameters, stay in float32, as transformers loads a model in bf16. The
        model is one: a definition counts until the next is made.
        """
        linears = [module for module in self.model.modules() if isinstance(module, nn.Linear)]
        for module in linears:
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()
        for name, parameter in self.model.named_parameters():
            parameter.data = self._parameters[name].to(DTYPES[packed_from]).to(DTYPES[dtype])
        for name, module in self._linears:
            weight = self._parameters[f"{name}.weight"].to(DTYPES[packed_from])
            # A head that is the embedding, too, has a format of its own, and its inputs are not rounded.
            tied = name == "lm_head" and self.model.config.tie_word_embeddings
            module.weight.data = rounded_to(weight, TIED_HEAD if tied and quant != "none" else quant).to(DTYPES[dtype])
            if compute == "int8" and not tied:
                module.register_forward_pre_hook(lambda _, given: (round_activations(given[0]), *given[1:]))
        if dtype == "bf16":
            for module in linears:
                sum_in_float32(module)
        return Definition(self.model, self.tokenizer)


class Definition:
    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer

    def ask(self, num_windows: int, num_questions: int) -> Found:
        """As `measure.ask`, by transformers."""
        texts = windows(self.encode, num_windows)
        return Found(list(map(self._score, texts)), *self._answers(num_questions))

    @torch.inference_mode()
    def inputs(self) -> dict[str, Tensor]:
        """The rows [T, K] of the first window that reach each linear layer, before compute rounds them."""
        found: dict[str, Tensor] = {}
        hooks = [
            module.register_forward_pre_hook(
                lambda _, given, name=name: found.__setitem__(name, given[0][0].clone()), prepend=True
            )
            for name, module in self._model.named_modules()
            if isinstance(module, nn.Linear)
        ]
        (ids,) = windows(self.encode, 1)
        self._model(torch.tensor([ids]))
        for hook in hooks:
            hook.remove()
        return found

    def encode(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return found

    @torch.inference_mode()
    def predict(self, ids: list[int]) -> Tensor:
        """Natural log probabilities of what follows each of n `ids` but the last: [n - 1, V], float64."""
        found: Tensor = self._model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
        return found

    def _score(self, ids: list[int]) -> list[float]:
        found: list[float] = self.predict(ids).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        return found

    @torch.inference_mode()
    def _answers(self, count: int) -> tuple[list[list[int]], list[str]]:
        if not count:
            return [], []
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS[:count]]
        rendered = [self._tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False) for c in chats]
        ids = [self._tokenizer.encode(text, add_special_tokens=False) for text in rendered]
        stop = self._model.config.eos_token_id
        stops = stop if isinstance(stop, list) else [stop]
        # What all chats begin with is computed once.
        common = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*ids, strict=False))
        begin = [tokens[0] for tokens in common]
        cache = DynamicCache(config=self._model.config)
        self._model(torch.tensor([begin]), past_key_values=cache)
        cache.batch_repeat_interleave(count)
        longest = max(map(len, ids))
        gaps = [longest - len(each) for each in ids]
        pairs = list(zip(ids, gaps, strict=True))
        padded = torch.tensor([begin + [stops[0]] * gap + each[len(begin) :] for each, gap in pairs])
        mask = torch.tensor([[1] * len(begin) + [0] * gap + [1] * (len(each) - len(begin)) for each, gap in pairs])
        out = self._model.generate(
            padded, attention_mask=mask, past_key_values=cache, max_new_tokens=ANSWER, do_sample=False,
            pad_token_id=stops[0], temperature=None, top_p=None, top_k=None,
        )[:, longest:].tolist()  # fmt: skip
        answers = []
        for each in out:
            end = next((place + 1 for place, token in enumerate(each) if token in stops), len(each))
            answers.append(each[:end])
        return answers, [self._tokenizer.decode(each, skip_special_tokens=True) for each in answers]


def rounded_to(weight: Tensor, quant: str) -> Tensor:
    """The weights that a format means, packed by torch from a matrix in its own dtype."""
    form = get_format(quant)
    layout = form.layout((weight.shape[0], weight.shape[1]), str(weight.dtype).removeprefix("torch."))
    return pack_into(weight, layout, torch.zeros(layout.nbytes, dtype=torch.uint8)).dequantize(
        torch.empty(weight.shape)
    )


def sum_in_float32(linear: nn.Linear) -> None:
    """Products of bf16 with sums in float32, as processors with such instructions do: on others torch is slow."""
    linear.float()
    linear.register_forward_pre_hook(lambda _, given: tuple(each.float() for each in given))
    linear.register_forward_hook(lambda _, given, out: out.bfloat16())


def round_activations(given: Tensor) -> Tensor:
    """int8 with a scale for each 32 columns, in float32: products sum integers, which bf16 would round once more."""
    groups = given.float().view(*given.shape[:-1], -1, COLUMNS)
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return ((groups / scale).round() * scale).flatten(-2)
