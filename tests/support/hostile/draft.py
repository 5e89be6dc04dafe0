"""A checkpoint taken apart, so that any part of it can be told wrongly, and put together again."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
Text = Callable[[bytes], bytes]
ITEM_NBYTES = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8, "I64": 8}


@dataclass(slots=True)
class Part:
    """A tensor: what the header will say, and its bytes. Offsets are counted when the file is written.

    A `spoiled` one is left alone by later mutations, which could undo what was done to it.
    """

    name: str
    dtype: str
    shape: list[Any]
    data: bytes
    fields: dict[str, Any] = field(default_factory=dict)
    spoiled: bool = False

    @property
    def layer(self) -> int | None:
        words = self.name.split(".")
        return int(words[words.index("layers") + 1]) if "layers" in words else None


@dataclass(slots=True)
class Draft:
    """`late` changes the written files; the index follows the tensors until `index_text` says otherwise."""

    config: dict[str, Any]
    files: dict[str, list[Part]]
    metadata: Any = None
    with_index: bool = False
    config_text: list[Text] = field(default_factory=list)
    index_text: list[Text] = field(default_factory=list)
    header_text: list[Text] = field(default_factory=list)
    late: list[Callable[[Path], None]] = field(default_factory=list)

    @property
    def parts(self) -> list[Part]:
        return [part for parts in self.files.values() for part in parts]

    def remove(self, part: Part) -> None:
        for parts in self.files.values():
            if part in parts:
                parts.remove(part)

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / CONFIG).write_bytes(_through(self.config_text, json.dumps(self.config).encode()))
        for index, (file, parts) in enumerate(self.files.items()):
            # Texts of headers are changed in one file only.
            header = _through(self.header_text if index == 0 else [], self._header(parts))
            body = b"".join(part.data for part in parts)
            (folder / file).write_bytes(struct.pack("<Q", len(header)) + header + body)
        if self.with_index:
            weight_map = {part.name: file for file, parts in self.files.items() for part in parts}
            text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()
            (folder / INDEX).write_bytes(_through(self.index_text, text))
        for change in self.late:
            change(folder)

    def _header(self, parts: list[Part]) -> bytes:
        pairs, position = [], 0
        if self.metadata is not None:
            pairs.append(f'"__metadata__":{json.dumps(self.metadata)}')
        for part in parts:
            fields = {"dtype": part.dtype, "shape": part.shape, "data_offsets": [position, position + len(part.data)]}
            pairs.append(f"{json.dumps(part.name)}:{json.dumps({**fields, **part.fields})}")
            position += len(part.data)
        return ("{" + ",".join(pairs) + "}").encode()


def take_apart(folder: Path, num_files: int = 1) -> Draft:
    """The draft of a good checkpoint in one file, its tensors dealt out to `num_files`."""
    data = (folder / SINGLE).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    header.pop("__metadata__", None)
    parts = [
        Part(name, tensor["dtype"], tensor["shape"], body[slice(*tensor["data_offsets"])])
        for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    ]
    names = [f"model-{i + 1:05}-of-{num_files:05}.safetensors" for i in range(num_files)] if num_files > 1 else [SINGLE]
    files = {name: parts[i::num_files] for i, name in enumerate(names)}
    return Draft(json.loads((folder / CONFIG).read_text()), files, with_index=num_files > 1)


def _through(changes: list[Text], text: bytes) -> bytes:
    for change in changes:
        text = change(text)
    return text
