"""A recorded machine, and the config of a model of 30 billion parameters, for plans that are the same everywhere.

The machine has 8 GiB of GPU memory behind 22 GB/s, 32 GiB of RAM, and a disk of 3.1 GB/s.
"""

import json
from pathlib import Path

from moedge.offload.machine.hardware import GpuInfo, Hardware
from moedge.offload.machine.profile import (
    Disk,
    DiskRead,
    Link,
    LoadingRates,
    Machine,
    Overheads,
    PinLimit,
)
from moedge.runtime.plan.presets import OVERHEADS

GIB = 1 << 30
PACK = {"none": 3e9, "int8": 1e9, "int4": 2e8, "nf4": 2e8}
COSTS = Overheads(1e-3, 5e-5, 2e-6, 2e-10, 3e-4, 5e-5)
RECORDED = Machine(
    Hardware("a desktop's CPU", 8, 32 * GIB, (GpuInfo("RTX 3060 Ti", 8 * GIB, "8.6", 38),), "nvme ext4"),
    4e10,
    Disk(True, GIB, (DiskRead(1 << 20, 1, 2e9), DiskRead(1 << 20, 4, 3.1e9)), write_bytes_s=1.5e9),
    Link(8.1e9, 2.2e10),
    PinLimit(4 * GIB, False),
    device_memory_bytes_s=4e11,
    device_flop_s={name: {1: 2e11, 1024: 1.6e13} for name in ("none", "int8", "int4", "nf4")},
    overheads=COSTS,
    fused_overheads=COSTS,
    device_overheads=OVERHEADS,
    kernel_lacks={"attention": "", "cache": "", "experts": ""},
    loading=LoadingRates(1e9, PACK),
)
CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "vocab_size": 151936, "max_position_embeddings": 40960,
    "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "torch_dtype": "bfloat16",
}  # fmt: skip
NAME = "Qwen3-30B-A3B"


def config_only(parent: Path) -> Path:
    """A folder with the config alone, which is enough for a plan."""
    folder = parent / NAME
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
