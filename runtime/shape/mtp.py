"""Multi-token prediction (MTP) heads, as DeepSeek-V3 and GLM-4.5 ship them: one more decoder layer behind the last, and
what joins its two inputs. Torch-free; `runtime/model/mtp.py` has the definition.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...offload.checkpoint.header import TensorEntry
from ..settings.errors import UnsupportedModel
from .config import ModelConfig

# Families whose head is a layer of their own class that attends to all tokens. With states that cannot be taken back,
# as Qwen3-Next has them, and with indexers, as DeepSeek-V3.2 has, passes draft nothing.
MTP = ("deepseek_v3", "glm4_moe")
# What the layer has beside the tensors of every other. It also carries copies of the embedding and the output head,
# which the model shares with it (arXiv:2412.19437, section 2.2) and which are not read.
_OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")


def count_head(config: ModelConfig) -> None:
    """Makes the head the last of a config's layers. Raises UnsupportedModel where the config names none."""
    count = config.get("num_nextn_predict_layers")
    if config.family.model_type not in MTP or not count:
        raise UnsupportedModel(
            f"speculate mtp: num_nextn_predict_layers {count} of a {config.family.model_type} was found; wanted is a "
            f"checkpoint with an MTP head of {' or '.join(MTP)}; leave speculate at auto"
        )
    config.values["num_hidden_layers"] = config.size("num_hidden_layers") + 1
    config.mtp = True


def check_head(config: ModelConfig, layers: Mapping[int, Mapping[str, TensorEntry]]) -> None:
    """Raises UnsupportedModel unless the files have the head: many copies of a checkpoint leave it out."""
    index, hidden = config.size("num_hidden_layers") - 1, config.size("hidden_size")
    found = layers.get(index, {})
    if missing := [name for name in _OWN if name not in found]:
        raise UnsupportedModel(
            f"speculate mtp: layer {index} of the files has no {', '.join(missing)}; this copy of the checkpoint ships "
            "no MTP head: take one that does, or leave speculate at auto"
        )
    if (shape := found["eh_proj.weight"].shape) != (hidden, 2 * hidden):
        raise UnsupportedModel(f"speculate mtp: layer {index}: eh_proj is {list(shape)}, wanted {[hidden, 2 * hidden]}")
