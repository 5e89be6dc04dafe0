"""Every type of model of the installed transformers that answers in text, and whether `families.py` speaks of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from packaging.version import Version
from torch import nn

from moedge.runtime.model.text_class import text_class
from moedge.runtime.shape.families import MOE, SAME_AS, SINCE, SUPPORTED, WANTING, WRAPPERS

# The newest release whose types were all decided on. Of a newer one `make matrix` wants the same.
RECORDED = "5.24"
# Kinds of models that moedge does not run, by what their configurations say: no list needs to name each of them.
KINDS = {
    "an encoder that reads the prompt": lambda config: getattr(config, "is_encoder_decoder", False),
    "an encoder, unless `is_decoder` says otherwise": lambda config: hasattr(config, "is_decoder"),
}
REFUSED = {member for members in WANTING.values() for member in members}
# Layers that are enough to find experts in: the first ones are often dense.
_LAYERS = 6


@dataclass(frozen=True, slots=True)
class TextType:
    """A model type as checkpoints name it, its text model's type, and a default configuration of that, or its class
    where that has no valid one."""

    model_type: str
    text: str
    config: Any

    @property
    def is_accounted(self) -> bool:
        """Whether moedge runs it, or says why not."""
        named = {self.model_type, self.text}
        if named & REFUSED or self.model_type in SUPPORTED or self.model_type in SAME_AS:
            return True
        if WRAPPERS.get(self.model_type, "") in SUPPORTED:
            return True
        return any(kind(self.config) for kind in KINDS.values())

    def __str__(self) -> str:
        text = "" if self.text == self.model_type else f", whose text model is {self.text}"
        return f"{self.model_type}{text}: {kind_of(self.config)}"


@cache
def text_types() -> tuple[TextType, ...]:
    """All causal-LM and image-text-to-text types of the installed transformers."""
    return tuple(_text_types())


def _text_types() -> Iterator[TextType]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    for name in dict.fromkeys([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES]):
        try:
            whole = CONFIG_MAPPING[name]()
        except (StrictDataclassError, TypeError, ValueError):
            # No valid configuration of some classes has their defaults.
            yield TextType(name, name, CONFIG_MAPPING[name])
            continue
        # A configuration that has a text model's inside, and says itself that an encoder reads the prompt.
        config = whole if getattr(whole, "is_encoder_decoder", False) else whole.get_text_config(decoder=True)
        yield TextType(name, config.model_type, config)


def unaccounted() -> list[str]:
    """The types that families.py neither runs nor refuses, with what is inside."""
    return [str(each) for each in text_types() if not each.is_accounted]


def misfiled() -> list[str]:
    """The families that run here, and whose modules route experts, or do not, against the table that they stand in."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from support.tiny_families import tiny_config

    here = Version(version("transformers"))
    run = [family for family in SUPPORTED if family in CONFIG_MAPPING and Version(SINCE.get(family, "0")) <= here]
    kinds = {family: kind_of(tiny_config(family)) for family in run}
    return [f"{name} is {kind}" for name, kind in kinds.items() if kind != ("mixture" if name in MOE else "dense")]


def kind_of(config: Any) -> str:
    """Whether a text model routes experts, by its modules on the meta device: "mixture" or "dense", or why neither."""
    try:
        for name in ("num_hidden_layers", "num_layers", "n_layers"):
            if type(getattr(config, name, None)) is int and not hasattr(config, "layer_types"):
                setattr(config, name, min(getattr(config, name), _LAYERS))
        with torch.device("meta"):
            model = text_class(type(config))(config)
    except Exception as error:  # Configurations are transformers' defaults, and any of its own code may refuse them.
        return f"not built from its defaults ({type(error).__name__}: {' '.join(str(error).split())[:100]})"
    return "mixture" if any(map(_routes, model.modules())) else "dense"


def _routes(module: nn.Module) -> bool:
    """Whether a module counts several experts and has weights: theirs, or those that choose between them."""
    counts = [getattr(module, name, None) for name in _COUNTS]
    return any(type(count) is int and count > 1 for count in counts) and next(module.parameters(), None) is not None


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def is_newer() -> bool:
    """Whether the installed transformers is newer than the newest recorded release."""
    return Version(version("transformers")).release[:2] > Version(RECORDED).release
