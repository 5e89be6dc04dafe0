"""The offset that is subtracted from every quantized key: the mean key of each layer and head over a fixed text.

It is measured once for a model and kept with its weights, never from a job's rows: blocks that rows share must not
depend on which rows came first. Any text will do, because quantization suffers from what all tokens have in common
(quant/kv/codec.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from ...offload.atomic_file import write_atomically
from ...offload.errors import BadStore
from ..attention.torch_backend import KeyMeans
from ..engine.sequence import Sequence, pack
from ..model.runner import ModelRunner
from ..sampling.params import SequenceSampling
from ..shape.model_shape import KVGroup, ModelShape
from ..text.tokenizer import Tokenizer

FILE = "note-key-offsets.safetensors"
MAX_TOKENS = 256
TEXT = """The harbour was quiet when the last ferry came in. Two fishermen folded their nets, counted 14 crates of
herring and argued about the price: €3.20 a kilo in May, less than half of it in September. "We should have sold in
spring," said the older one; the other shrugged.

def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0

Zur gleichen Zeit schrieb die Lehrerin einen Brief. La biblioteca abre a las nueve. 今日は天気がいいですね。 Привет!

1. Boil 250 ml of water. 2. Add the rice, wait for 12 minutes. 3. Serve it with lemon.
Question: What is the capital of Australia? Answer: Canberra, which was founded in 1913.
{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"], "alive": false}
Theorem. Every bounded sequence of real numbers has a convergent subsequence. Proof. Bisect it again and again.
"""


@dataclass(frozen=True, slots=True)
class KeyOffsets:
    """Key offsets, float32 [H, D] by layer; layers without attention have none, and an MTP head, which is in no job's
    answers: a job goes on with it or without."""

    layers: Mapping[int, torch.Tensor]

    @property
    def digest(self) -> str:
        """Identifies the offsets: cached keys under other offsets mean something else."""
        return sha256(b"".join(self.layers[layer].numpy().tobytes() for layer in sorted(self.layers))).hexdigest()[:16]

    def of(self, group: KVGroup) -> torch.Tensor:
        """The offsets of a layer group that attends, [layers of the group, H, D]; zeros of a head."""
        none = torch.zeros(group.kv_heads, group.head_dim)
        return torch.stack([self.layers.get(layer, none) for layer in group.layers])


def fixed_token_ids(folder: Path) -> list[int]:
    """The first tokens of the fixed text, by the model's tokenizer."""
    with Tokenizer.load(folder) as tokenizer:
        return tokenizer.encode(TEXT)[:MAX_TOKENS]


def measure(model: ModelRunner, token_ids: Items[int]) -> KeyOffsets:
    """Measures the offsets in one pass over `token_ids`; the model's attention backend is restored afterwards.

    Products round no activation, whatever the job does: a store keeps the offsets for jobs of either arithmetic.
    """
    attention, means = model.attention, KeyMeans()
    model.attention = means
    try:
        sequence = Sequence(list(token_ids), SequenceSampling(1))
        # Before the first sequence of a job, any state is free.
        sequence.table.state = 0
        with model.in_floats():
            model.forward(pack([(sequence, len(token_ids))]))
    finally:
        model.attention = attention
    return KeyOffsets({layer: mean.contiguous() for layer, mean in sorted(means.means.items())})


def keep(store: Path, offsets: KeyOffsets) -> None:
    """Writes the offsets into a store's folder."""
    tensors = {f"layers.{index}": layer for index, layer in offsets.layers.items()}
    write_atomically(store / FILE, save(tensors))


def kept(store: Path, shape: ModelShape) -> KeyOffsets | None:
    """The offsets of a store; None where it has none, as stores of earlier versions do not. Raises BadStore."""
    path = store / FILE
    if not path.is_file():
        return None
    groups = [group for group in shape.kv_groups if not group.is_index]
    sizes = {layer: (group.kv_heads, group.head_dim) for group in groups for layer in group.layers}
    layers = sorted(sizes)[: len(sizes) - shape.mtp]
    wanted = {f"layers.{layer}": sizes[layer] for layer in layers}
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise BadStore(f"{path} cannot be read ({error}); delete it, and it is measured again") from None
    sound = all(tensor.dtype == torch.float32 and bool(tensor.isfinite().all()) for tensor in tensors.values())
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != wanted or not sound:
        raise BadStore(f"{path} belongs to another model or is damaged; delete it, and it is measured again")
    return KeyOffsets({layer: tensors[f"layers.{layer}"] for layer in layers})
