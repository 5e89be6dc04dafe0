"""Checkpoints with a multi-token prediction (MTP) head as published ones have it, and its definition in torch."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from support.tiny_families import save_tiny

LAYERS = 2


def save_mtp(family: str, folder: Path, layers: int = LAYERS, **sizes: Any) -> Path:
    """A tiny random checkpoint of `layers` and a head: the last layer of one with a layer more, and its own."""
    model = save_tiny(family, folder, num_hidden_layers=layers + 1, **sizes)
    write_head(folder, model.config.hidden_size)
    return folder


def write_head(folder: Path, hidden: int, own: dict[str, torch.Tensor] | None = None) -> None:
    """Makes the last layer of a checkpoint its head, with tensors of its `own`, or random ones."""
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors, generator = load_file(path), torch.Generator().manual_seed(5)
    layer = f"model.layers.{config['num_hidden_layers'] - 1}"
    if own is None:
        own = {name: 1 + torch.rand(hidden, generator=generator) for name in ("enorm", "hnorm", "shared_head.norm")}
        own["eh_proj"] = torch.randn(hidden, 2 * hidden, generator=generator) / hidden**0.5
        # Of ones, so that whether a state is normed once or twice would not show.
        tensors["model.norm.weight"] += torch.rand(hidden, generator=generator)
    dtype = tensors["model.norm.weight"].dtype
    tensors |= {f"{layer}.{name}.weight": tensor.to(dtype) for name, tensor in own.items()}
    # Copies that no loader reads: with other numbers, so that reading them would show.
    tensors[f"{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] + 1
    tensors[f"{layer}.shared_head.head.weight"] = tensors["lm_head.weight"] + 1
    save_file(tensors, path, {"format": "pt"})
    config |= {"num_hidden_layers": config["num_hidden_layers"] - 1, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))


class Reference(nn.Module):
    """A stock model and the head of arXiv:2412.19437, section 2.2, over whole sequences, without a cache."""

    def __init__(self, model: Any) -> None:
        """`model` is stock and has the head's layer as its last one."""
        super().__init__()
        self.model = model
        hidden, eps = model.config.hidden_size, model.config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (nn.RMSNorm(hidden, eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)

    @classmethod
    def read(cls, folder: Path) -> "Reference":
        """Of a checkpoint on the disk, by the names of its tensors."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        last = config.num_hidden_layers
        config.num_hidden_layers += 1
        found = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
        reference, tensors = cls(found.eval()), load_file(folder / "model.safetensors")
        for name, module in reference.own().items():
            module.weight.data = tensors[f"model.layers.{last}.{name}.weight"].float()
        return reference.requires_grad_(False)

    def own(self) -> dict[str, Any]:
        """The head's modules beside its layer, by the names of checkpoints."""
        return {
            "enorm": self.enorm, "hnorm": self.hnorm, "shared_head.norm": self.norm, "eh_proj": self.eh_proj,
        }  # fmt: skip

    def layers(self, hidden: torch.Tensor, chosen: slice) -> torch.Tensor:
        """hidden [B, T, D] behind some of the layers, with causal attention."""
        decoder, count = self.model.model, hidden.shape[1]
        positions = torch.arange(count).unsqueeze(0)
        rotary = decoder.rotary_emb(hidden, positions)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None].to(hidden.dtype)
        for layer in decoder.layers[chosen]:
            hidden = layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        return hidden

    def states(self, token_ids: torch.Tensor) -> torch.Tensor:
        """h [B, T, D] of the model, behind its last norm."""
        embedded = self.model.model.embed_tokens(token_ids)
        return self.model.model.norm(self.layers(embedded, slice(0, -1)))

    def predict(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """States [B, T, D] of the head from the tokens behind each position and the states there."""
        embedded = self.enorm(self.model.model.embed_tokens(token_ids))
        inputs = self.eh_proj(torch.cat([embedded, self.hnorm(hidden)], -1))
        return self.norm(self.layers(inputs, slice(-1, None)))

    def drafts(self, token_ids: list[int], depth: int) -> torch.Tensor:
        """Logits [depth, V] of what the head drafts behind `token_ids`, the likeliest of each taken for the next."""
        tokens = torch.tensor([token_ids])
        hidden, found = self.states(tokens[:, :-1]), []
        for _ in range(depth):
            made = self.predict(tokens[:, 1:], hidden)
            found.append(self.model.lm_head(made[0, -1]))
            # What the cache has of the positions before stays; the drafted token stands behind the last state.
            hidden = torch.cat([hidden, made[:, -1:]], 1)
            tokens = torch.cat([tokens, found[-1].argmax().view(1, 1)], 1)
        return torch.stack(found)
