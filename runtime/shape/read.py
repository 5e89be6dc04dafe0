"""Reads a ModelShape from config.json and the headers of a checkpoint, by the names of the tensors. Torch-free."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...offload.checkpoint.header import TensorEntry, described
from ...offload.errors import BadCheckpoint
from ...quant.formats.format import OPTION_DTYPES
from ..settings.errors import UnsupportedModel
from .config import ModelConfig, attention_modules, head_dim, kind, kv_heads, latent_size, sharing_layers, window
from .config_fields import out_of_range
from .families import EITHER_WAY, JOINED, MERGED, SHARING, TEXT_AND_PICTURES
from .model_shape import ExpertsShape, KVGroup, LayerShape, Matrix, ModelShape, RowTable, StateGroup, StoredFormat
from .quantized import ModelTensors, QuantizedWeight, ReadSmall, model_tensors

_CONVOLUTION = re.compile(r"(?<!norm)(^|[._])conv(1d)?\.weight$")
# The rows of a table of n-grams, in as many tensors as files cut it into.
_TABLE = re.compile(r"^(.*\bngram_embedding)(?:\.shard_(\d{1,6}))?\.weight$")
# A convolution beside that of the layer's mixer.
_TABLE_CONVOLUTION = "ple.conv1d.weight"
_ATTENTION = re.compile(r"(^|\.)(self_attn|attention|mixer)\.(k_proj|kv_a_proj_with_mqa)\.")
# Modules under the name of attention that are recurrent.
_RECURRENT_ATTENTION = re.compile(r"(^|\.)(self_attn|attention)\.\w*conv1d\.")
# Channels of the convolution, tokens that it spans (0 of both without one), and the shape of the scan's state.
_State = tuple[int, int, tuple[int, ...]]


def is_convolution(name: str) -> bool:
    """Whether a tensor of a layer holds the kernel [C, 1, K] of a causal convolution."""
    return _CONVOLUTION.search(name) is not None


def table_part(name: str) -> tuple[str, int] | None:
    """Of a tensor with rows of a table that stays on the disk: the table's module, and where its part stands in it."""
    found = _TABLE.match(name)
    return (found[1], int(found[2] or 0)) if found else None


def attends(tensors: Mapping[str, TensorEntry]) -> bool:
    """Whether a layer with recurrent ones beside it, by the names of its tensors, has keys and values."""
    return any(map(_ATTENTION.search, tensors)) and not any(map(_RECURRENT_ATTENTION.search, tensors))


def state_groups(config: ModelConfig, layers: Mapping[int, Mapping[str, TensorEntry]]) -> tuple[StateGroup, ...]:
    """Recurrent layers, grouped by what a sequence keeps in them; empty for families that have none.

    Raises UnsupportedModel where the files hold other convolutions than the config describes, or no attention.
    """
    rule = RECURRENT.get(config.family.model_type)
    if rule is None:
        return ()
    channels, width, recurrent = rule(config)
    found: dict[StateGroup, list[int]] = defaultdict(list)
    for index, tensors in sorted(layers.items()):
        kernels = [
            entry.shape for name, entry in tensors.items() if is_convolution(name) and name != _TABLE_CONVOLUTION
        ]
        if not width and not attends(tensors):
            found[StateGroup((), (), recurrent)].append(index)
        if not kernels:
            continue
        # Some files have a kernel each for queries, keys and values.
        if sum(shape[0] for shape in kernels) != channels or {shape[1:] for shape in kernels} != {(1, width)}:
            raise UnsupportedModel(f"layer {index}: convolution {kernels}, config.json says {[channels, 1, width]}")
        found[StateGroup((), (channels, width - 1), recurrent)].append(index)
    for index, tensors in sorted(layers.items()):
        if (kernel := tensors.get(_TABLE_CONVOLUTION)) is not None:
            wide, dilation = config.size("hc_count") * config.size("hidden_size"), config.size("ngram_size")
            taps = config.size("ple_conv_kernel_size")
            if kernel.shape != (wide, 1, taps):
                raise UnsupportedModel(f"layer {index}: {kernel.name} is {kernel.shape}, wanted {[wide, 1, taps]}")
            # Numbered behind the layers: a layer with one has two convolutions.
            found[StateGroup((), (wide, (taps - 1) * dilation))].append(len(layers) + index)
    if not any(map(attends, layers.values())):
        raise UnsupportedModel("no layer has attention: models of recurrent layers alone do not run yet")
    return tuple(StateGroup(tuple(each), group.conv, group.recurrent) for group, each in found.items())


def _gated_delta(config: ModelConfig) -> _State:
    """Gated delta nets: one matrix [K, V] per value head."""
    heads = config.get("num_attention_heads")
    keys = config.get("linear_num_key_heads") or heads
    values = config.get("linear_num_value_heads") or heads
    key_dim = config.get("linear_key_head_dim") or int(0.75 * config.size("hidden_size") / keys)
    value_dim = config.get("linear_value_head_dim") or 2 * key_dim
    channels = 2 * keys * key_dim + values * value_dim
    return channels, config.size("linear_conv_kernel_dim"), (values, key_dim, value_dim)


def _kimi_delta(config: ModelConfig) -> _State:
    """Kimi Delta Attention: one matrix [K, V] per head."""
    heads = config.get("linear_num_heads") or config.size("num_attention_heads")
    dim = config.get("linear_head_dim") or config.size("head_dim")
    width = config.get("short_conv_kernel_size") or config.size("linear_conv_kernel_dim")
    return 3 * heads * dim, width, (heads, dim, dim)


def _lightning(config: ModelConfig) -> _State:
    """Lightning attention: one matrix [K, V] per head, and no convolution."""
    heads = config.size("num_attention_heads")
    dim = config.get("head_dim") or config.size("hidden_size") // heads
    return 0, 0, (heads, dim, dim)


def _mamba2(config: ModelConfig) -> _State:
    """Mamba-2: one matrix [P, N] per head."""
    inner = config.get("mamba_d_ssm") or int(config.get("mamba_expand") * config.size("hidden_size"))
    heads, size = config.get("mamba_n_heads") or config.size("n_mamba_heads"), config.size("mamba_d_state")
    groups = config.get("mamba_n_groups") or config.size("mamba_ngroups")
    if inner % heads or heads % groups:
        raise out_of_range("mamba_n_heads", heads, f"a divisor of {inner} and a multiple of mamba_n_groups {groups}")
    channels = inner + 2 * groups * size
    return channels, config.size("mamba_d_conv"), (heads, inner // heads, size)


def _nemotron(config: ModelConfig) -> _State:
    heads, dim, size = (config.size(name) for name in ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"))
    channels = heads * dim + 2 * config.size("n_groups") * size
    return channels, config.size("conv_kernel"), (heads, dim, size)


def _mamba(config: ModelConfig) -> _State:
    """Mamba-1: one vector [N] per channel."""
    channels = int(config.get("mamba_expand") * config.size("hidden_size"))
    return channels, config.size("mamba_d_conv"), (channels, config.size("mamba_d_state"))


def _short_convolution(config: ModelConfig) -> _State:
    return config.size("hidden_size"), config.size("conv_L_cache"), ()


RECURRENT: Mapping[str, Callable[[ModelConfig], _State]] = {
    "bailing_hybrid": _kimi_delta,
    "bamba": _mamba2,
    "falcon_h1": _mamba2,
    "granitemoehybrid": _mamba2,
    "jamba": _mamba,
    "kimi_linear": _kimi_delta,
    "lfm2": _short_convolution,
    "lfm2_moe": _short_convolution,
    "lara_mini": _gated_delta,
    "lfm3": _short_convolution,
    "minimax": _lightning,
    "nemotron_h": _nemotron,
    "olmo_hybrid": _gated_delta,
    "qwen3_5_moe_text": _gated_delta,
    "qwen3_5_text": _gated_delta,
    "qwen3_next": _gated_delta,
    "qwen4_exp_text": _gated_delta,
    "zamba2": _mamba2,
}


LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"experts\.(\d+)\.(.+)$")
# Tensors that no pass needs, because a model computes them itself: decays of lightning attention, numbers that hash
# n-grams. An MTP head carries copies of the embedding and the output head.
_UNUSED = re.compile(
    r"\.(slope_rate|query_decay|key_decay|diagonal_decay|layer_multipliers|ngram_heads_vocab_sizes|ngram_heads_offsets)$"
    r"|layers\.\d+\.(embed_tokens|shared_head\.head)\.weight$"
)
_INDEXER = re.compile(r"(^|\.)indexer\.(wk|k_proj|index_qk_proj)\.weight$")
_ROUTER = re.compile(r"(^|\.)(gate|gate\.wg|shared_expert_gate|router|router\.\w+)\.weight$")
_DOWN = re.compile(r"(^|\.)(down_proj|w2|fc2|output_linear)(\.weight)?$")
_OPTION_OF = {each.safetensors: name for name, each in OPTION_DTYPES.items()}


def is_router(name: str) -> bool:
    """Whether a weight is a router; routers are not quantized, so that routing is exact."""
    return _ROUTER.search(name) is not None


def is_matrix(name: str) -> bool:
    """Whether a two-dimensional tensor of a layer is a linear weight that is quantized and streamed."""
    plain = name.endswith(".weight") and not name.endswith("norm.weight") and not is_router(name)
    return plain and table_part(name) is None


# Layers have the same names; more of them than this are no checkpoint's.
@lru_cache(maxsize=1 << 14)
def expert_index(name: str) -> int | None:
    """Which expert a tensor belongs to, where a checkpoint keeps its experts apart."""
    match = _EXPERT.search(name)
    return int(match[1]) if match else None


def with_expert_index(name: str, expert: int) -> str:
    """The name of the same tensor of another expert, where a checkpoint keeps its experts apart."""
    return _EXPERT.sub(lambda match: f"experts.{expert}.{match[2]}", name)


def is_unused(name: str) -> bool:
    """Whether a tensor of a layer belongs to a part that is replaced, and is not read."""
    return _UNUSED.search(name) is not None


def is_down(name: str) -> bool:
    """Whether a tensor of experts holds their last matrix."""
    return _DOWN.search(name) is not None


def is_expert(name: str, entry: TensorEntry) -> bool:
    """Whether a tensor of a layer holds matrices of one expert, or of all experts stacked."""
    return expert_index(name) is not None or (len(entry.shape) == 3 and not is_convolution(name))


@dataclass(frozen=True, slots=True)
class Tensors:
    """A checkpoint's tensors: of each layer by their names in it, and those `outside` of layers."""

    layers: Mapping[int, Mapping[str, TensorEntry]]
    outside: Mapping[str, TensorEntry]


def by_layer(config: ModelConfig, entries: Mapping[str, TensorEntry]) -> Tensors:
    """Drops layers that only predict further tokens (MTP)."""
    layers: dict[int, dict[str, TensorEntry]] = defaultdict(dict)
    outside: dict[str, TensorEntry] = {}
    num_layers, renamed = config.size("num_hidden_layers"), config.family.renamed
    identities = config.get("zero_expert_num") or 0
    for name, entry in entries.items():
        match = LAYER.search(name)
        if match is None:
            outside[name] = entry
            continue
        index = int(match[1])
        kept = (index < num_layers or not is_extra_layer(config, index)) and not is_unused(name)
        if kept and not is_extra_expert(name, identities, config.num_experts or 0):
            layers[index][renamed_in(match[2], renamed) if renamed else match[2]] = entry
    return Tensors(layers, outside)


def is_extra_layer(config: ModelConfig, index: int) -> bool:
    """Whether a layer predicts tokens after the next one (MTP): transformers ignores those, too."""
    num_layers = config.size("num_hidden_layers")
    return num_layers <= index < num_layers + (config.get("num_nextn_predict_layers") or 0)


def is_extra_expert(name: str, identities: int, num_experts: int) -> bool:
    """Whether a tensor is a matrix of one of the last experts, which return their input: transformers writes some."""
    return identities > 0 and (expert_index(name) or 0) >= num_experts


def renamed_in(name: str, renamed: Mapping[str, str]) -> str:
    """The name in transformers' module of a tensor that a family's checkpoints name otherwise."""
    for found, wanted in renamed.items():
        name = name.replace(found, wanted)
    return name


def divided(config: ModelConfig, entry: TensorEntry) -> Sequence[TensorEntry]:
    """The tensors of the text model that one of the files consists of: one, but for families that have several as one,
    or those of pictures beside them.

    Raises BadCheckpoint where its rows are not theirs.
    """
    if config.family.model_type == TEXT_AND_PICTURES:
        return _for_text(config, entry)
    if config.family.model_type in SHARING:
        return [entry._replace(name=shared_name(config, entry.name))]
    joined, names = JOINED.get(config.family.model_type, ("", ()))
    if not joined or joined not in entry.name:
        return [entry]
    rows, row_nbytes = _rows_of(config), entry.nbytes // max(1, entry.shape[0] if entry.shape else 0)
    if not entry.shape or entry.shape[0] != sum(rows):
        raise BadCheckpoint(f"{described(entry.name)} is {list(entry.shape)}, wanted {sum(rows)} rows")
    parts, begin = [], entry.begin
    for name, count in zip(names, rows, strict=True):
        end = begin + count * row_nbytes
        parts.append(TensorEntry(entry.name.replace(joined, name), entry.dtype, (count, *entry.shape[1:]), begin, end))
        begin = end
    return parts


# What layer 0 has of the blocks that layers share, and the name that a layer has for the one that it uses.
SHARED = "shared_blocks"
_SHARED = re.compile(r"(^|\.)layers\.(\d+)\.shared_transformer\.")


def shared_name(config: ModelConfig, name: str) -> str:
    """The name in layer 0 of a tensor of a shared block, which files have under one of the layers that use it."""
    match, layers = _SHARED.search(name), sharing_layers(config)
    if match is None or int(match[2]) not in layers:
        return name
    block = layers.index(int(match[2])) % config.size("num_mem_blocks")
    return f"{name[: match.start()]}{match[1]}layers.0.{SHARED}.{block}.{name[match.end() :]}"


def _for_text(config: ModelConfig, entry: TensorEntry) -> list[TensorEntry]:
    """Of experts and routers those for text, and the first row of corrections, which have two."""
    if entry.name.endswith(".gate.weight_1") or (expert_index(entry.name) or 0) >= (config.num_experts or 0):
        return []
    if entry.name.endswith("e_score_correction_bias") and entry.shape and entry.shape[0] == 2:
        return [entry._replace(shape=(1, *entry.shape[1:]), end=entry.begin + entry.nbytes // 2)]
    return [entry]


def _rows_of(config: ModelConfig) -> tuple[int, ...]:
    """The rows of each part of a matrix in JOINED."""
    if config.family.model_type == "sarvam_moe":
        size, heads = config.size("head_dim"), config.size("num_attention_heads")
        keys = config.size("num_key_value_heads") * size
        return heads * size, keys, keys
    heads = config.size("linear_num_value_heads")
    values = heads * config.size("linear_value_head_dim")
    return 2 * config.size("linear_num_key_heads") * config.size("linear_key_head_dim") + values, values, heads, heads


def tensors_of(config: ModelConfig, entries: Mapping[str, TensorEntry], read: ReadSmall | None = None) -> ModelTensors:
    """The tensors that a model has of those in its files. Raises BadCheckpoint, UnsupportedModel."""
    return model_tensors(config.quantization, entries, config.dtype, config.family.transposed_experts, read)


def model_shape(
    config: ModelConfig, found: ModelTensors | Mapping[str, TensorEntry], tensors: Tensors | None = None
) -> ModelShape:
    """`found` are a model's tensors or those of its files, `tensors` the same by layer, where that is known.

    Raises UnsupportedModel where names or shapes are not those of the config's family.
    """
    found = found if isinstance(found, ModelTensors) else tensors_of(config, found)
    entries = found.entries
    tensors = tensors or by_layer(config, entries)
    layers, outside = tensors.layers, tensors.outside
    num_layers = config.size("num_hidden_layers")
    if sorted(layers) != list(range(num_layers)):
        raise UnsupportedModel(f"config.json says {num_layers} layers, the files hold {_ranges(layers)}")
    head = _find(outside, "lm_head.weight")
    embedding = _find(outside, "embed_tokens.weight") or _find(outside, "embeddings.weight")
    if embedding is None:
        raise UnsupportedModel("the files hold no tensor *.embed_tokens.weight")
    tied = bool(config.get("tie_word_embeddings")) or head is None
    vocab, hidden = embedding.shape
    # The layers that have an indexer; others of the same model attend to what one before them has chosen.
    return ModelShape(
        model_type=config.family.model_type,
        dtype=_dtype(entries.values()),
        hidden=hidden,
        vocab=vocab,
        context=config.context,
        layers=tuple(_layer(index, layers[index], config, found) for index in range(num_layers)),
        kv_groups=kv_groups(
            config,
            _attending(config, layers),
            [index for index, tensors in sorted(layers.items()) if any(map(_INDEXER.search, tensors))],
        ),
        head=None if tied or head is None else Matrix("lm_head", head.shape[0], head.shape[1]),
        resident_numel=sum(entry.numel for entry in outside.values() if entry not in (head, embedding)),
        stored=stored_formats(found, tensors),
        widened_nbytes=max((_matrix_nbytes(weight) for weight in found.quantized.values()), default=0),
        state_groups=state_groups(config, layers),
        own_code=config.own_code,
        streams=config.get("hc_count") or 1,
        mtp=config.mtp,
    )


def _matrix_nbytes(weight: QuantizedWeight) -> int:
    """Bytes of a matrix in the files: of one expert's, where experts are stacked."""
    shape = weight.entry.shape
    return weight.nbytes // (shape[0] if len(shape) == 3 else 1)


def stored_formats(found: ModelTensors, tensors: Tensors) -> tuple[StoredFormat, ...]:
    """What lies in the files: elements and bytes by group of tensors and format, the largest first."""
    sums: dict[tuple[str, str, str | None], list[int]] = defaultdict(lambda: [0, 0])
    groups = [(entry, _group(name, entry)) for layer in tensors.layers.values() for name, entry in layer.items()]
    groups += [(entry, OUTER if len(entry.shape) == 2 else SMALL) for entry in tensors.outside.values()]
    for entry, group in groups:
        weight = found.quantized.get(entry.name)
        label = _OPTION_OF.get(entry.dtype, entry.dtype) if weight is None else weight.label
        total = sums[group, label, weight.kept if weight and weight.bits else None]
        total[0] += entry.numel
        total[1] += entry.nbytes if weight is None else weight.nbytes
    stored = [StoredFormat(group, label, numel, nbytes, kept) for (group, label, kept), (numel, nbytes) in sums.items()]
    return tuple(sorted(stored, key=lambda each: (GROUPS.index(each.group), -each.nbytes)))


EXPERTS, ATTENTION, FEED_FORWARD, OUTER, SMALL = (
    "experts", "attention", "feed-forward", "embedding and head", "norms, routers, biases",
)  # fmt: skip
GROUPS = (EXPERTS, ATTENTION, FEED_FORWARD, OUTER, SMALL)


def _group(name: str, entry: TensorEntry) -> str:
    if is_expert(name, entry):
        return EXPERTS
    if table_part(name):
        return OUTER
    if len(entry.shape) != 2 or not is_matrix(name):
        return SMALL
    return group_of(name)


def group_of(name: str) -> str:
    """Attention or feed-forward, for a matrix of a layer that is no expert's."""
    return ATTENTION if "attn" in name or "attention" in name else FEED_FORWARD


def _attending(config: ModelConfig, layers: Mapping[int, Mapping[str, TensorEntry]]) -> list[int]:
    """The layers that have keys and values: all of them, but in families that have recurrent ones."""
    if config.family.model_type in SHARING:
        return sharing_layers(config)
    hybrid = config.family.model_type in RECURRENT
    return [index for index, tensors in sorted(layers.items()) if not hybrid or attends(tensors)]


def kv_groups(
    config: ModelConfig, attending: Iterable[int] | None = None, indexing: Iterable[int] = ()
) -> tuple[KVGroup, ...]:
    """Layers that attend, by default all, grouped by what their cache must hold, in the order of their first layer.

    The last group are the layers that are `indexing`, if there are any.
    """
    groups: dict[tuple[int | None, ...], list[int]] = defaultdict(list)
    for layer in range(config.size("num_hidden_layers")) if attending is None else attending:
        key = kv_heads(config, layer), head_dim(config, layer), window(config, layer)
        latent = ("qk_rope_head_dim", "num_attention_heads") if config.is_latent else ()
        own = (latent_size(config, layer, name) for name in latent)
        # Layers that choose are computed otherwise than those beside them that do not.
        groups[kind(config, layer) == "minimax_m3_sparse", *key, *own].extend(attention_modules(config, layer))
    found = [KVGroup(tuple(layers), *key[1:]) for key, layers in groups.items()]  # type: ignore[arg-type]
    if config.is_indexed and (layers := tuple(indexing)):
        size, chosen = config.index_key
        found.append(KVGroup(layers, 1, size, None, chosen=chosen))
    return tuple(found)


def _layer(index: int, tensors: Mapping[str, TensorEntry], config: ModelConfig, found: ModelTensors) -> LayerShape:
    experts, expert_names = _experts(tensors, config, found)
    dense = {
        name: entry
        for name, entry in tensors.items()
        if name not in expert_names and len(entry.shape) == 2 and is_matrix(name)
    }
    parts = [entry for name, entry in tensors.items() if table_part(name)]
    resident = [
        entry
        for name, entry in tensors.items()
        if name not in dense and name not in expert_names and not table_part(name)
    ]
    matrices = tuple(
        Matrix(
            name.removesuffix(".weight"), sum(part.shape[0] for part in parts), parts[0].shape[1],
            # Conversions join floats.
            *(_stored_as(parts, found) if len(parts) == 1 else ("", _stored_as(parts, found)[1])),
            # Attention multiplies queries and sums of latents with parts of the one; the other is small, and decides.
            unpacked=config.is_latent and name.endswith(("kv_b_proj.weight", "indexer.weights_proj.weight")),
            uses=_uses(config, name),
        )
        for name, parts in sorted(_merged(config, dense).items())
    )  # fmt: skip
    numel = sum(entry.numel for entry in resident)
    return LayerShape(index, matrices, experts, numel, _table(parts, config) if parts else None)


def _table(parts: Sequence[TensorEntry], config: ModelConfig) -> RowTable:
    """Raises UnsupportedModel unless the parts are matrices with as many columns, of one dtype of floats."""
    kinds = {(entry.dtype, entry.shape[1:]) for entry in parts}
    dtype, columns = min(kinds)
    if len(kinds) > 1 or len(columns) != 1 or dtype not in _OPTION_OF:
        raise UnsupportedModel(f"{described(parts[0].name)} and parts beside it are of kinds {sorted(kinds)[:3]}")
    return RowTable(sum(entry.shape[0] for entry in parts), columns[0], config.table_rows)


def _uses(config: ModelConfig, name: str) -> int:
    """How many layers multiply with a matrix: those that share its block, unless it is an adapter of one of them."""
    if not name.startswith(SHARED) or "adapter" in name:
        return 1
    return len(sharing_layers(config)[int(name.split(".")[1]) :: config.size("num_mem_blocks")])


def _merged(config: ModelConfig, dense: Mapping[str, TensorEntry]) -> dict[str, list[TensorEntry]]:
    """The tensors of a layer's matrices by the names of the module, which may have one where files have several."""
    whole, parts = MERGED.get(config.family.model_type, ("", ()))
    found: dict[str, list[TensorEntry]] = defaultdict(list)
    for name, entry in dense.items():
        found[renamed_in(name, dict.fromkeys(parts, whole))].append(entry)
    return found


def _stored_as(entries: Iterable[TensorEntry], found: ModelTensors) -> tuple[str, int]:
    """`kept` and `bits` of a matrix that is made of these tensors, or of a layer's experts of which each is."""
    weights = [found.quantized.get(entry.name) for entry in entries]
    kept = {"" if weight is None else weight.kept for weight in weights}
    return kept.pop() if len(kept) == 1 else "", max((weight.bits if weight else 0 for weight in weights), default=0)


def _experts(
    tensors: Mapping[str, TensorEntry], config: ModelConfig, found: ModelTensors
) -> tuple[ExpertsShape | None, set[str]]:
    """The layer's experts and the names of the tensors that they consist of."""
    fused = {name: entry for name, entry in tensors.items() if len(entry.shape) == 3 and not is_convolution(name)}
    indices = {name: index for name in tensors if (index := expert_index(name)) is not None}
    if not fused and not indices:
        return None, set()
    if fused:
        count = {entry.shape[0] for entry in fused.values()}
        transposed = config.family.transposed_experts or _is_turned(config, fused)
        shapes = [(name, entry.shape[:0:-1] if transposed else entry.shape[1:]) for name, entry in fused.items()]
    else:
        first, count = min(indices.values()), {len(set(indices.values()))}
        shapes = [(name, tensors[name].shape) for name in indices if f"experts.{first}." in name]
    names = fused.keys() | indices.keys()
    up = [shape for name, shape in shapes if not _DOWN.search(name)]
    down = [shape for name, shape in shapes if _DOWN.search(name)]
    matrices_only = all(len(shape) == 2 for _, shape in shapes)
    if not matrices_only or len(count) != 1 or len(down) != 1 or not up or len({cols for _, cols in up}) != 1:
        raise UnsupportedModel(f"experts of unequal or unknown make: {sorted(tensors)[:6]}")
    of_down = [entry for name, entry in tensors.items() if name in names and _DOWN.search(name)]
    of_up = [entry for name, entry in tensors.items() if name in names and not _DOWN.search(name)]
    matrices = (
        Matrix("up", sum(rows for rows, _ in up), up[0][1], *_stored_as(of_up, found)),
        Matrix("down", down[0][0], down[0][1], *_stored_as(of_down, found)),
    )
    return ExpertsShape(count.pop(), config.experts_per_token, *matrices), set(fused) | set(indices)


def _is_turned(config: ModelConfig, stacked: Mapping[str, TensorEntry]) -> bool:
    """Whether files hold experts as [E, in, out] that they may hold as [E, out, in], too: transformers sees it so."""
    hidden = config.size("hidden_size")
    ups = [entry.shape for name, entry in stacked.items() if not _DOWN.search(name)]
    return config.family.model_type in EITHER_WAY and all(shape[1] == hidden != shape[2] for shape in ups)


def _find(tensors: Mapping[str, TensorEntry], suffix: str) -> TensorEntry | None:
    found = [entry for name, entry in tensors.items() if name.endswith(suffix) and len(entry.shape) == 2]
    return found[0] if len(found) == 1 else None


def _dtype(entries: Iterable[TensorEntry]) -> str:
    """The dtype that holds most bytes."""
    nbytes: dict[str, int] = defaultdict(int)
    for entry in entries:
        nbytes[entry.dtype] += entry.nbytes
    dtype = max(nbytes, key=lambda name: nbytes[name])
    if dtype not in _OPTION_OF:
        raise UnsupportedModel(f"weights are {dtype}, wanted one of {', '.join(_OPTION_OF)}")
    return _OPTION_OF[dtype]


def _ranges(layers: Iterable[int]) -> str:
    found = sorted(layers)
    return f"{len(found)} ({found[0]} to {found[-1]})" if found else "none"
