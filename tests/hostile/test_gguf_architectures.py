"""Of a GGUF file of any architecture (`runtime/shape/gguf_architectures.py`) a key that is missing or of another kind,
and a tensor of another shape, are refused in a sentence, or read.
"""

import json
import math
import struct
from typing import Any

import pytest

from moedge.offload.checkpoint.gguf_file import Array
from moedge.offload.checkpoint.header import TensorEntry
from moedge.offload.errors import BadCheckpoint
from moedge.runtime.settings.errors import UnsupportedModel
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.shape.gguf import gguf_config
from moedge.runtime.shape.gguf_tensors import gguf_tensors
from moedge.runtime.shape.read import by_layer, model_shape
from support.gguf_converted import FAMILIES, record_of

VALUES: tuple[Any, ...] = (
    -1, 0, 1, 3, 255, 1 << 31, (1 << 63) - 1, math.nan, 1e300, -0.5, True, "abc", [1, 2], [], Array(5), [0.5] * 4,
    [True] * 6, [7] * 4, [0] * 4, [1, "x"],
)  # fmt: skip


def bytes_of(shape: list[int], numbers: list[float]) -> bytes:
    count = math.prod(shape)
    return struct.pack(f"<{count}f", *[*numbers, *[0.0] * count][:count])


def is_refused(record: dict[str, Any], metadata: dict[str, Any]) -> bool:
    """Whether the shape of a file with the record's tensors is refused in a sentence."""
    tensors, message = record["tensors"], ""
    entries = {
        name: TensorEntry(name, "F32", tuple(shape), 0, 4 * math.prod(shape)) for name, (shape, _) in tensors.items()
    }
    try:
        values = gguf_config(metadata, entries, lambda name: bytes_of(*tensors[name]))
        config = ModelConfig(values)
        found = gguf_tensors(config, entries)
        model_shape(config, found, by_layer(config, found.entries))
    except (BadCheckpoint, UnsupportedModel) as error:
        message = str(error)
    assert len(message) < 2500
    assert message.isprintable()
    return bool(message)


@pytest.mark.sample("lfm2_moe")
@pytest.mark.parametrize("case", FAMILIES)
def test_keys_and_shapes_that_are_others_are_refused_or_read(case: str) -> None:
    record = json.loads(record_of(case).read_text())
    metadata = record["metadata"]
    assert not is_refused(record, metadata)
    refused = 0
    for name, (shape, numbers) in record["tensors"].items():
        for other in (shape[::-1], [*shape, 1], [1, *shape], shape[1:] or [2], [each + 1 for each in shape], [1 << 40]):
            spoiled = {**record["tensors"], name: [other, numbers]}
            refused += is_refused({**record, "tensors": spoiled}, metadata)
    for key in metadata:
        is_refused(record, {name: value for name, value in metadata.items() if name != key})
        refused += sum(is_refused(record, {**metadata, key: value}) for value in VALUES)
    assert refused > len(metadata)
