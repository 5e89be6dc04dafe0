"""Cuts a dense model into a mixture of experts: real weights and real routing, but no trained mixture.

    python -m bench.make_real_mixture --out models/cut           # minutes on two cores; the same bytes every time
    python -m bench.make_real_mixture --table 24 20 16 12 8      # perplexity by the number of experts of a token

SmolLM2-135M-Instruct, whose 1,536 intermediate neurons of every layer become 24 experts of 64: MoEfication (Zhang et
al., Findings of ACL 2022). Neurons that are active on the same tokens share an expert, and a linear router is fitted
to how long each expert's output is. The checkpoint is a Mixtral with the dense model's attention, norms and embedding.
The weights of a token's k experts are 1/k each, and their down projections k times as large: with all experts it
computes what the dense model does. SwiGLU is less sparse than the paper's ReLU, so k is large.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, MixtralConfig

from support.real.rotation import unpacked

# Formats have groups of 32 and 64 columns, so an expert has 64.
NUM_EXPERTS = 24
# The smallest number with which perplexity is at most twice the dense model's: `--table`, docs/dev/experts.md.
PER_TOKEN = 16
WINDOW = 512
CALIBRATION, HELD_OUT = 20 * WINDOW, 8 * WINDOW
# Router scores are at most this, so that a softmax over the chosen ones is even: their order is what remains of them.
LARGEST_SCORE = 2e-4
_SWEEPS = 8
_RIDGE = 1e-3


# --- Text that Python ships


def prose() -> tuple[str, str]:
    """Python's help, every second topic to cut by and the others to judge by."""
    from pydoc_data.topics import topics

    ordered = [text for _, text in sorted(topics.items())]
    return "\n".join(ordered[1::2]), "\n".join(ordered[::2])


def code() -> tuple[str, str]:
    """Modules of the standard library to cut by and others to judge by."""
    cut_by, judged_by = ("argparse", "difflib"), ("inspect", "pathlib", "statistics", "subprocess", "tarfile")
    return stdlib(cut_by), stdlib(judged_by)


def stdlib(names: Iterable[str]) -> str:
    folder = Path(sysconfig.get_path("stdlib"))
    return "\n".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in names)


def windows(tokenizer: Any, parts: list[str], count: int) -> torch.Tensor:
    """The first `count` tokens, of every part as many, in rows of WINDOW tokens: [count / WINDOW, WINDOW]."""
    each = count // WINDOW // len(parts) * WINDOW
    ids = [tokenizer.encode(part, add_special_tokens=False)[:each] for part in parts]
    whole = torch.tensor(list(chain.from_iterable(ids)))
    return whole[: len(whole) // WINDOW * WINDOW].view(-1, WINDOW)


# --- Cutting


@dataclass(frozen=True, slots=True)
class Cut:
    """How a layer is cut: `neurons` [E, I / E] by expert, and the weights `router` [E, D]."""

    neurons: torch.Tensor
    router: torch.Tensor


def cut(model: LlamaForCausalLM, ids: torch.Tensor, num_experts: int) -> list[Cut]:
    """Cuts every layer by what it computes on the tokens `ids` [n, W]."""
    states = inputs(model, ids)
    return [cut_layer(layer.mlp, states.pop(0), num_experts) for layer in model.model.layers]


def inputs(model: LlamaForCausalLM, ids: torch.Tensor) -> list[torch.Tensor]:
    """What the feed-forward network of every layer gets: [T, D] by layer."""
    found: list[list[torch.Tensor]] = [[] for _ in model.model.layers]

    def note(layer: int) -> Any:
        return lambda module, args: found[layer].append(args[0].flatten(0, -2))

    hooks = [each.mlp.register_forward_pre_hook(note(layer)) for layer, each in enumerate(model.model.layers)]
    with torch.no_grad():
        for row in ids:
            model.model(row.unsqueeze(0))
    for hook in hooks:
        hook.remove()
    return [torch.cat(parts) for parts in found]


def cut_layer(mlp: Any, states: torch.Tensor, num_experts: int) -> Cut:
    """Cuts a layer by its activations on `states` [T, D]."""
    with torch.no_grad():
        active = neurons_of(mlp, states)
        down = mlp.down_proj.weight
        neurons = cluster(active.abs() * down.norm(dim=0), num_experts)
        lengths = torch.stack([(active[:, each] @ down[:, each].T).norm(dim=1) for each in neurons], 1)
        router = fit(states, lengths / lengths.mean(1, keepdim=True))
        return Cut(neurons, router * (LARGEST_SCORE / (states @ router.T).abs().max()))


def neurons_of(mlp: Any, states: torch.Tensor) -> torch.Tensor:
    """The activations of a network's neurons [T, I]."""
    found: torch.Tensor = mlp.act_fn(mlp.gate_proj(states)) * mlp.up_proj(states)
    return found


def cluster(strength: torch.Tensor, count: int) -> torch.Tensor:
    """Neurons that are active on the same tokens, in clusters of one size: [count, I / count], each ascending.

    `strength` [T, I] is how much each neuron adds to each token. Balanced k-means by cosine.
    """
    rows = torch.nn.functional.normalize(strength.T.contiguous())
    clusters = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).view(count, -1)
    for _ in range(_SWEEPS):
        centers = torch.nn.functional.normalize(torch.stack([rows[each].sum(0) for each in clusters]))
        clusters = balanced(rows @ centers.T)
    return clusters


def balanced(similarity: torch.Tensor) -> torch.Tensor:
    """Gives every cluster as many of the items of `similarity` [I, C]: the most similar pairs first. [C, I / C]."""
    items, count = similarity.shape
    taken: list[list[int]] = [[] for _ in range(count)]
    free = [True] * items
    for pair in similarity.flatten().argsort(descending=True, stable=True).tolist():
        item, group = divmod(pair, count)
        if free[item] and len(taken[group]) < items // count:
            free[item] = False
            taken[group].append(item)
    return torch.tensor([sorted(group) for group in taken])


def fit(states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The weights [E, D] of the linear map of `states` [T, D] nearest to `wanted` [T, E]: ridge regression."""
    x = states.double()
    gram = x.T @ x
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
    return torch.linalg.solve(gram, x.T @ wanted.double()).T.float()


# --- What it costs


def perplexity(model: Any, ids: torch.Tensor) -> float:
    """exp of the mean negative log probability of every token of a row of `ids` [n, W] but its first."""
    scored = []
    with torch.no_grad():
        for row in ids:
            logprobs = model(row.unsqueeze(0)).logits[0, :-1].log_softmax(-1)
            scored.append(logprobs.gather(1, row[1:].unsqueeze(1)))
    return math.exp(-float(torch.cat(scored).double().mean()))


@contextmanager
def routed(model: LlamaForCausalLM, cuts: list[Cut], per_token: int) -> Iterator[None]:
    """Within it the dense model computes what a mixture of `per_token` experts would."""

    def forward(mlp: Any, one: Cut) -> Any:
        owner = torch.empty(one.neurons.numel(), dtype=torch.long)
        owner[one.neurons] = torch.arange(len(one.neurons)).unsqueeze(1).expand_as(one.neurons)

        def mix(states: torch.Tensor) -> Any:
            scores = states @ one.router.T
            chosen = torch.zeros_like(scores).scatter_(-1, scores.topk(per_token).indices, 1.0)
            return mlp.down_proj(neurons_of(mlp, states) * chosen[..., owner])

        return mix

    layers = [layer.mlp for layer in model.model.layers]
    for mlp, one in zip(layers, cuts, strict=True):
        mlp.forward = forward(mlp, one)
    try:
        yield
    finally:
        for mlp in layers:
            del mlp.forward


def print_table(model: LlamaForCausalLM, cuts: list[Cut], ids: torch.Tensor, counts: Iterable[int]) -> None:
    dense = perplexity(model, ids)
    print("| experts a token | perplexity | of the dense model's |\n|---|---|---|")
    print(f"| dense | {dense:.2f} | 1.00 |", flush=True)
    for count in counts:
        with routed(model, cuts, count):
            found = perplexity(model, ids)
        print(f"| {count} of {len(cuts[0].neurons)} | {found:.2f} | {found / dense:.2f} |", flush=True)


# --- The checkpoint


def tensors_of(
    model: LlamaForCausalLM, cuts: list[Cut], per_token: int, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a Mixtral by name, those that are not cut as they are."""
    for name, tensor in model.state_dict().items():
        if ".mlp." not in name and name != "lm_head.weight":
            yield name, tensor
    for layer, (dense, one) in enumerate(zip(model.model.layers, cuts, strict=True)):
        prefix, mlp = f"model.layers.{layer}.block_sparse_moe.", dense.mlp
        yield f"{prefix}gate.weight", one.router
        for expert, neurons in enumerate(one.neurons):
            yield f"{prefix}experts.{expert}.w1.weight", mlp.gate_proj.weight[neurons]
            yield f"{prefix}experts.{expert}.w3.weight", mlp.up_proj.weight[neurons]
            # 1/k is rounded as the router's weights are, so that both cancel in the arithmetic of the checkpoint.
            yield f"{prefix}experts.{expert}.w2.weight", mlp.down_proj.weight[:, neurons] * per_token


def write(
    model: LlamaForCausalLM, tokenizer: Any, cuts: list[Cut], per_token: int, dtype: torch.dtype, out: Path
) -> None:
    """Writes the checkpoint into the new folder `out`."""
    out.mkdir(parents=True)
    dense = model.config
    config = MixtralConfig(
        **{key: getattr(dense, key) for key in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "rms_norm_eps", "rope_parameters", "max_position_embeddings", "bos_token_id", "eos_token_id",
            "pad_token_id", "tie_word_embeddings",
        )},
        architectures=["MixtralForCausalLM"], dtype=dtype, intermediate_size=cuts[0].neurons.shape[1],
        num_local_experts=len(cuts[0].neurons), num_experts_per_tok=per_token,
    )  # fmt: skip
    config.save_pretrained(out)
    tokenizer.save_pretrained(out)
    tensors = {name: each.to(dtype).contiguous() for name, each in tensors_of(model, cuts, per_token, dtype)}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    print(f"{sum(each.nbytes for each in tensors.values()) / 1e9:.2f} GB in {out}")


def load(folder: Path | None) -> tuple[LlamaForCausalLM, Any]:
    """The dense model in float32 and its tokenizer: that of `folder`, or SmolLM2's out of its GGUF file."""
    place = folder or unpacked()
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a new folder for the checkpoint")
    parser.add_argument("--table", type=int, nargs="+", metavar="K", help="print the perplexity with K experts a token")
    parser.add_argument("--model", type=Path, help="a dense checkpoint of the family llama instead")
    parser.add_argument("--experts", type=int, default=NUM_EXPERTS)
    parser.add_argument("--per-token", type=int, default=PER_TOKEN)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    model, tokenizer = load(options.model)
    (prose_to_cut, prose_to_judge), (code_to_cut, _) = prose(), code()
    cuts = cut(model, windows(tokenizer, [prose_to_cut, code_to_cut], CALIBRATION), options.experts)
    if options.table:
        print_table(model, cuts, windows(tokenizer, [prose_to_judge], HELD_OUT), options.table)
    if options.out:
        write(model, tokenizer, cuts, options.per_token, getattr(torch, options.dtype), options.out)


if __name__ == "__main__":
    main()
