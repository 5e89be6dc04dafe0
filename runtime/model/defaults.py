"""Generates `runtime/shape/defaults.json`: what only transformers' config classes know, for code without torch.

Run as `python -m moedge.runtime.model.defaults`; a test rebuilds the table and compares.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from ..shape.families import SUPPORTED

_FIELDS = (
    "attention_bias", "decoder_sparse_step", "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings",
    "max_window_layers", "mlp_bias", "mlp_only_layers", "moe_intermediate_size", "num_attention_heads", "num_experts",
    "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads", "num_local_experts", "pad_token_id",
    "sliding_window", "sliding_window_pattern", "tie_word_embeddings", "use_sliding_window", "vocab_size",
)  # fmt: skip


def rebuild() -> dict[str, Any]:
    """The table, by `model_type`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    table = {}
    for model_type in SUPPORTED:
        config_class = CONFIG_MAPPING[model_type]
        # The class's own defaults: an instance has replaced some by what follows from the others, such as head_dim.
        values = {field.name: field.default for field in dataclasses.fields(config_class)}
        table[model_type] = {
            "architecture": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type],
            "defaults": {name: values[name] for name in _FIELDS if name in values},
            "aliases": dict(sorted(config_class.attribute_map.items())),
        }
    return table


def main() -> None:
    path = Path(__file__).parent.parent / "shape" / "defaults.json"
    path.write_text(json.dumps(rebuild(), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
