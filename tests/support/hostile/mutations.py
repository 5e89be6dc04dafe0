"""Ways to spoil a checkpoint, each of which knows whether what comes out must be refused."""

import copy
import json
import os
import random
import struct
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.hostile.draft import CONFIG, INDEX, Draft, Part

REFUSE, ACCEPT = "refuse", "accept"
# A mutation changes the draft and returns the verdict, or None where the draft has nothing that it applies to.
Mutation = Callable[[Draft, random.Random], str | None]
MUTATIONS: dict[str, Mutation] = {}


def mutation(change: Mutation) -> Mutation:
    MUTATIONS[change.__name__] = change
    return change


def part_of(draft: Draft, rng: random.Random, wanted: Callable[[Part], bool] = lambda part: True) -> Part | None:
    """A tensor to spoil, None where there is none left."""
    parts = [part for part in draft.parts if wanted(part) and not part.spoiled]
    if not parts:
        return None
    part = rng.choice(parts)
    part.spoiled = True
    return part


def of_each(values: dict[str, Any], change: Callable[[Draft, random.Random, Any], str | None], prefix: str) -> None:
    """Registers one mutation for each of some values."""
    for name, value in values.items():
        MUTATIONS[f"{prefix}: {name}"] = lambda draft, rng, value=value: change(draft, rng, value)


# Headers: what a file says of a tensor.


def field_of_a_tensor(draft: Draft, rng: random.Random, fields: Any) -> str | None:
    part = part_of(draft, rng)
    if part is None:
        return None
    size = len(part.data)
    part.fields = fields(part, size) if callable(fields) else fields
    return REFUSE


of_each(
    {
        "integers": {"dtype": "I32"},
        "half as wide": {"dtype": "F16"},
        "twice as wide": {"dtype": "F64"},
        "8 bit": {"dtype": "F8_E4M3"},
        "unknown": {"dtype": "F7"},
        "a list": {"dtype": ["F32"]},
        "null": {"dtype": None},
    },
    field_of_a_tensor,
    "dtype",
)
of_each(
    {
        "longer": lambda part, size: {"shape": [part.shape[0] + 1, *part.shape[1:]]},
        "shorter": lambda part, size: {"shape": [part.shape[0] - 1, *part.shape[1:]]},
        "of a dimension more": lambda part, size: {"shape": [1, *part.shape]},
        "scalar": {"shape": []},
        "negative": {"shape": [-1, -64]},
        "huge": {"shape": [2**62, 2**62]},
        "beyond 64 bit": {"shape": [2**64, 0]},
        "nine dimensions": {"shape": [1] * 9},
        "a float": {"shape": [64.0]},
        "true": {"shape": [True, True]},
        "a text": {"shape": "64"},
        "a number": {"shape": 64},
        "nested": {"shape": [[64]]},
    },
    field_of_a_tensor,
    "shape",
)
of_each(
    {
        "reversed": lambda part, size: {"data_offsets": [size, 0]},
        "at the start": lambda part, size: {"data_offsets": [0, size], "shape": [size // 4, 1]},
        "shifted": lambda part, size: {"data_offsets": [4, size + 4]},
        "far": lambda part, size: {"data_offsets": [2**61, 2**61 + size]},
        "negative": lambda part, size: {"data_offsets": [-size, 0]},
        "three": {"data_offsets": [0, 4, 8]},
        "texts": {"data_offsets": ["0", "4"]},
        "floats": {"data_offsets": [0.0, 4.0]},
        "null": {"data_offsets": None},
        "a field more": {"stride": [1]},
    },
    field_of_a_tensor,
    "offsets",
)


@mutation
def transposed(draft: Draft, rng: random.Random) -> str | None:
    part = part_of(draft, rng, lambda part: len(part.shape) == 2 and part.shape[0] != part.shape[1])
    if part is None:
        return None
    part.shape = part.shape[::-1]
    return REFUSE


@mutation
def rows_added_with_their_bytes(draft: Draft, rng: random.Random) -> str | None:
    part = part_of(draft, rng, lambda part: len(part.shape) > 0 and part.shape[0] > 1)
    if part is None:
        return None
    row = len(part.data) // part.shape[0]
    part.shape, part.data = [part.shape[0] + 1, *part.shape[1:]], part.data + part.data[:row]
    return REFUSE


@mutation
def rows_removed_with_their_bytes(draft: Draft, rng: random.Random) -> str | None:
    part = part_of(draft, rng, lambda part: len(part.shape) > 0 and part.shape[0] > 1)
    if part is None:
        return None
    row = len(part.data) // part.shape[0]
    part.shape, part.data = [part.shape[0] - 1, *part.shape[1:]], part.data[:-row]
    return REFUSE


@mutation
def dropped(draft: Draft, rng: random.Random) -> str | None:
    part = part_of(draft, rng)
    if part is None:
        return None
    draft.remove(part)
    return REFUSE


@mutation
def dropped_from_every_layer(draft: Draft, rng: random.Random) -> str | None:
    part = part_of(draft, rng, lambda part: part.layer is not None)
    if part is None:
        return None
    own = part.name.split(f"layers.{part.layer}.")[1]
    for each in [each for each in draft.parts if each.name.endswith(f".{own}")]:
        draft.remove(each)
    return REFUSE


@mutation
def last_layer_dropped(draft: Draft, rng: random.Random) -> str | None:
    last = max((part.layer for part in draft.parts if part.layer is not None), default=None)
    for part in [part for part in draft.parts if part.layer == last and last is not None]:
        draft.remove(part)
    return REFUSE


def renamed(draft: Draft, rng: random.Random, rename: Callable[[str], str]) -> str | None:
    part = part_of(draft, rng)
    if part is None or rename(part.name) == part.name:
        return None
    part.name = rename(part.name)
    return REFUSE


of_each(
    {
        "outside": lambda name: "../../etc/passwd",
        "absolute": lambda name: "/etc/passwd",
        "nothing": lambda name: "",
        "NUL": lambda name: name + "\0",
        "an escape sequence": lambda name: name + "\x1b[2J",
        "a surrogate": lambda name: name + "\ud800",
        "too long": lambda name: name + "x" * 600,
        "a layer that is not": lambda name: name.replace("layers.0.", "layers.700."),
        "a huge layer": lambda name: name.replace("layers.1.", f"layers.{'9' * 400}."),
        "an index of two digits": lambda name: name.replace("layers.1.", "layers.01."),
        "an expert that is not": lambda name: name.replace("experts.1.", "experts.77."),
        "another prefix": lambda name: "evil." + name,
        "a bias": lambda name: name.replace(".weight", ".bias"),
        "upper case": str.upper,
        "a private name": lambda name: "__class__",
    },
    renamed,
    "name",
)


@mutation
def names_swapped(draft: Draft, rng: random.Random) -> str | None:
    one, two = part_of(draft, rng), part_of(draft, rng)
    if one is None or two is None or one.shape == two.shape:
        return None
    one.name, two.name = two.name, one.name
    return REFUSE


@mutation
def a_name_twice(draft: Draft, rng: random.Random) -> str | None:
    part = part_of(draft, rng)
    if part is None:
        return None
    rng.choice(list(draft.files.values())).append(copy.deepcopy(part))
    return REFUSE


def extra(draft: Draft, rng: random.Random, made: tuple[str, str]) -> str | None:
    name, verdict = made
    rng.choice(list(draft.files.values())).append(Part(name, "F32", [4], b"\0" * 16))
    return verdict


of_each(
    {
        "in a layer": ("model.layers.1.self_attn.evil.weight", REFUSE),
        "outside layers": ("model.evil.weight", REFUSE),
        "of a code object": ("__reduce__", REFUSE),
        "a bias": ("model.layers.0.self_attn.q_proj.evil_bias", REFUSE),
        "a computed buffer": ("model.layers.0.self_attn.rotary_emb.inv_freq", ACCEPT),
    },
    extra,
    "extra tensor",
)


@mutation
def harmless_metadata(draft: Draft, rng: random.Random) -> str:
    draft.metadata = {"format": "pt", "import": "os; __import__('os')", "x" * 100: "\u0000"}
    return ACCEPT


@mutation
def metadata_of_numbers(draft: Draft, rng: random.Random) -> str:
    draft.metadata = rng.choice([{"a": 1}, [], "text", 7, {"a": {"b": "c"}}])
    return REFUSE


@mutation
def header_order(draft: Draft, rng: random.Random) -> str:
    """Objects have no order: tensors may stand in the header otherwise than in the file."""
    draft.header_text.append(_shuffled)
    return ACCEPT


def _shuffled(text: bytes) -> bytes:
    try:
        return json.dumps(dict(reversed(json.loads(text, object_pairs_hook=_only_unique).items()))).encode()
    except (ValueError, AttributeError, RecursionError):
        # Another mutation made of it what is no object.
        return text


def _only_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("another mutation repeated a name, which a dictionary would repair")
    return dict(pairs)


def header_bytes(draft: Draft, rng: random.Random, change: tuple[Callable[[bytes], bytes], str]) -> str:
    draft.header_text.append(change[0])
    return change[1]


of_each(
    {
        "padded": (lambda text: text + b" " * 7, ACCEPT),
        "a BOM": (lambda text: b"\xef\xbb\xbf" + text, REFUSE),
        "UTF-16": (lambda text: text.decode("utf-8", "replace").encode("utf-16"), REFUSE),
        "not UTF-8": (lambda text: text.replace(b"weight", b"weigh\xff", 1), REFUSE),
        "a list": (lambda text: b"[" + text + b"]", REFUSE),
        "NaN": (lambda text: text.replace(b'"shape": ', b'"shape": NaN,"x":', 1), REFUSE),
        "a long number": (lambda text: text.replace(b'_offsets": [', b'_offsets": [' + b"9" * 5000, 1), REFUSE),
        "deep": (lambda text: b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", REFUSE),
        "cut": (lambda text: text[: len(text) // 2], REFUSE),
        "two objects": (lambda text: text + text, REFUSE),
        "many lists": (lambda text: b'{"a":[' + b"[]," * 2_000_000 + b"[]]}", REFUSE),
        "empty": (lambda text: b"{}", REFUSE),
    },
    header_bytes,
    "header",
)  # fmt: skip


# Values: what no header shows.


def value(draft: Draft, rng: random.Random, made: tuple[float, str]) -> str | None:
    part = part_of(draft, rng, lambda part: part.dtype == "F32" and len(part.data) >= 4)
    if part is None:
        return None
    position = rng.randrange(len(part.data) // 4) * 4
    part.data = part.data[:position] + struct.pack("<f", made[0]) + part.data[position + 4 :]
    return made[1]


of_each(
    {
        "NaN": (float("nan"), REFUSE),
        "infinity": (float("inf"), REFUSE),
        "minus infinity": (float("-inf"), REFUSE),
        "denormal": (1e-42, ACCEPT),
        "minus zero": (-0.0, ACCEPT),
    },
    value,
    "value",
)


@mutation
def in_float64(draft: Draft, rng: random.Random) -> str | None:
    part = part_of(draft, rng, lambda part: part.dtype == "F32")
    if part is None:
        return None
    part.dtype, part.data = "F64", array("d", array("f", part.data)).tobytes()
    return ACCEPT


# Files.


def late(draft: Draft, rng: random.Random, made: tuple[Callable[[Path, random.Random], None], str]) -> str | None:
    if draft.late:
        return None
    seed = rng.random()
    file = rng.choice(list(draft.files))
    draft.late.append(lambda folder: made[0](folder / file, random.Random(seed)))
    return made[1]


def _cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def _appended(path: Path, rng: random.Random) -> None:
    with path.open("ab") as file:
        file.write(bytes(rng.choice([1, 8, 4096])))


def _length(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        file.seek(0)
        changed = rng.choice([0, 1, length - 1, length + 1, length * 2, 2**63, 2**64 - 1, 100_000_000])
        file.write(struct.pack("<Q", changed))


def _hole(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    path.write_bytes(data[: 8 + length] + b"\0" * 8 + data[8 + length :])


def _instead(make: Callable[[Path], None]) -> Callable[[Path, random.Random], None]:
    def change(path: Path, rng: random.Random) -> None:
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
        make(path)

    return change


def _link_inside(path: Path, rng: random.Random) -> None:
    if path.is_file() and not path.is_symlink():
        path.rename(path.with_suffix(".moved"))
        path.symlink_to(path.with_suffix(".moved").name)


def _link_outside(path: Path, rng: random.Random) -> None:
    outside = path.parent.parent / f"outside-{path.parent.name}"
    if path.is_file():
        path.rename(outside)
    path.unlink(missing_ok=True)
    path.symlink_to(outside)


def _pickle(path: Path, rng: random.Random | None) -> None:
    path.with_name("pytorch_model.bin").write_bytes(b"\x80\x04.")


def _config(change: Callable[[Path, random.Random], None]) -> Callable[[Path, random.Random], None]:
    return lambda path, rng: change(path.parent / CONFIG, rng)


of_each(
    {
        "cut": (_cut, REFUSE),
        "trailing bytes": (_appended, REFUSE),
        "length": (_length, REFUSE),
        "a hole": (_hole, REFUSE),
        "empty": (_instead(Path.touch), REFUSE),
        "missing": (_instead(lambda path: None), REFUSE),
        "a folder": (_instead(Path.mkdir), REFUSE),
        "a pipe": (_instead(os.mkfifo), REFUSE),
        "a device": (_instead(lambda path: path.symlink_to("/dev/zero")), REFUSE),
        "a link to itself": (_instead(lambda path: path.symlink_to(path.name)), REFUSE),
        "a link outside": (_link_outside, REFUSE),
        "a link inside": (_link_inside, ACCEPT),
        "pickle instead": (_instead(lambda path: _pickle(path, None)), REFUSE),
        "pickle beside": (_pickle, ACCEPT),
        "code beside": (lambda path, rng: path.with_name("modeling_evil.py").write_text("raise SystemExit(1)"), ACCEPT),
        "config missing": (_config(_instead(lambda path: None)), REFUSE),
        "config a pipe": (_config(_instead(os.mkfifo)), REFUSE),
        "config a link outside": (_config(_link_outside), REFUSE),
    },
    late,
    "file",
)  # fmt: skip


# The index.


def indexed(
    draft: Draft, rng: random.Random, made: tuple[Callable[[dict[str, Any], random.Random], Any], str]
) -> str | None:
    if not draft.with_index or draft.index_text:
        return None
    seed = rng.random()

    def change(text: bytes) -> bytes:
        try:
            content = json.loads(text)
        except ValueError:
            return text
        if (
            not isinstance(content, dict)
            or not isinstance(content.get("weight_map"), dict)
            or not content["weight_map"]
        ):
            return text
        return json.dumps(made[0](content, random.Random(seed))).encode()

    draft.index_text.append(change)
    return made[1]


def _points(target: Any) -> Callable[[dict[str, Any], random.Random], Any]:
    def change(content: dict[str, Any], rng: random.Random) -> Any:
        content["weight_map"][rng.choice(sorted(content["weight_map"]))] = target
        return content

    return change


def _forgotten(content: dict[str, Any], rng: random.Random) -> Any:
    content["weight_map"].pop(rng.choice(sorted(content["weight_map"])))
    return content


def _invented(content: dict[str, Any], rng: random.Random) -> Any:
    content["weight_map"]["evil"] = rng.choice(list(content["weight_map"].values()))
    return content


def _elsewhere(content: dict[str, Any], rng: random.Random) -> Any:
    """One tensor said to be in the other file."""
    name = rng.choice(sorted(content["weight_map"]))
    others = {file for file in content["weight_map"].values() if file != content["weight_map"][name]}
    content["weight_map"][name] = min(map(str, others), default="none.safetensors")
    return content


of_each(
    {
        "forgotten": (_forgotten, REFUSE),
        "elsewhere": (_elsewhere, REFUSE),
        "invented": (_invented, REFUSE),
        "parent folder": (_points("../model.safetensors"), REFUSE),
        "absolute": (_points("/etc/passwd"), REFUSE),
        "below": (_points("a/b.safetensors"), REFUSE),
        "pickle": (_points("pytorch_model.bin"), REFUSE),
        "hidden": (_points(".x.safetensors"), REFUSE),
        "long": (_points("x" * 400 + ".safetensors"), REFUSE),
        "an escape sequence": (_points("\x1b[2J.safetensors"), REFUSE),
        "a number": (_points(7), REFUSE),
        "a list": (_points(["model.safetensors"]), REFUSE),
        "null": (_points(None), REFUSE),
        "a missing file": (_points("model-00009-of-00009.safetensors"), REFUSE),
        "no map": (lambda content, rng: {}, REFUSE),
        "an empty map": (lambda content, rng: {"weight_map": {}}, REFUSE),
        "a list for a map": (lambda content, rng: {"weight_map": []}, REFUSE),
        "in a list": (lambda content, rng: [content], REFUSE),
        "harmless metadata": (lambda content, rng: {**content, "metadata": {"total_size": -1, "x": [None]}}, ACCEPT),
    },
    indexed,
    "index",
)  # fmt: skip


@mutation
def index_not_json(draft: Draft, rng: random.Random) -> str | None:
    if not draft.with_index or draft.index_text:
        return None
    spoil = rng.choice(
        [b"", b"\xff\xfe", b"{", b'{"weight_map":{"a":"b.safetensors","a":"b.safetensors"}}', b"[" * 10**5]
    )
    draft.index_text.append(lambda text: spoil)
    return REFUSE


@mutation
def index_a_pipe(draft: Draft, rng: random.Random) -> str | None:
    if draft.late:
        return None
    draft.late.append(lambda folder: _instead(os.mkfifo)(folder / INDEX, rng))
    return REFUSE


@mutation
def tensor_in_the_other_file(draft: Draft, rng: random.Random) -> str | None:
    part = part_of(draft, rng)
    if part is None or not draft.with_index:
        return None
    draft.remove(part)
    rng.choice(list(draft.files.values())).append(part)
    return ACCEPT
