"""config.json of a checkpoint, read as hostile text: caps, ranges, no names of code, then defaults.

The values go to a transformers config class only after they passed here: a config key has fetched and run
code before, whatever the trust flag said (CVE-2026-4372, CVE-2026-22807).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from ...offload.checkpoint.checkpoint import read_inside
from ...offload.checkpoint.header import described, load_object
from ...quant.formats.format import WEIGHT_DTYPES
from ..settings.errors import UnsupportedModel
from .config_fields import FIELDS, LISTS, NESTED, ROPE_FIELDS, check_rope, checked_fields, out_of_range
from .families import BLOCK_INDEXED, BLOCK_SPARSE, INDEXED, LATENT, SHARING, Family, family, is_wrapper, text_config
from .quantization import parse_quantization

CONFIG = "config.json"
MAX_CONFIG_NBYTES = 1 << 20
MAX_DEPTH = 32
MAX_LAYERS = 512
MAX_TABLE_HEADS = 256
# The classes that transformers would import from the checkpoint's folder if it trusted it.
_OWN_CODE = "auto_map"
_NAMES_CODE = ("auto_map", "custom_pipelines", "kernel", "trust_remote_code", "_implementation")
_KNOWN = {"model_type", *FIELDS, *LISTS, *ROPE_FIELDS, *NESTED}


class ModelConfig:
    """The checked values of one config.json; `get` falls back to the family's defaults.

    `multimodal` says that they are those of the text model in it, `own_code` that the file names code of the
    checkpoint's own (`auto_map`): transformers' class for the family is used instead, and that code is never run.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        # Only the text model of a model that also sees or hears is built, so only its values matter.
        self.multimodal = is_wrapper(values)
        outer, values = values, text_config(values) if self.multimodal else values
        self.own_code = any(each.get(_OWN_CODE) is not None for each in (outer, values))
        self.family: Family = family(values.get("model_type"), own_code=self.own_code)
        values = {name: value for name, value in values.items() if name != _OWN_CODE}
        values = _as_now(self.family.model_type, values)
        _refuse_code(values, CONFIG)
        # Whether the last layer is an MTP head (mtp.py).
        self.mtp = False
        self.quantization = parse_quantization(values)
        self.dtype = _dtype(values)
        self.values = checked_fields({key: value for key, value in values.items() if key in _KNOWN})
        if self.family.model_type in TWO_ATTENTIONS:
            # Older releases of transformers write the number of attention modules under this name.
            self.values.pop("num_hidden_layers", None)
        check_rope(self.values, self.family.rope_by_kind, self.family.partial_rotary)
        self._check_heads()
        self._check_layer_types()
        self._check_experts()
        self._check_tables()

    @classmethod
    def read(cls, folder: Path) -> Self:
        path = folder / CONFIG
        if not path.exists():
            hint = "; a GGUF file is given by its own path" if any(folder.glob("*.gguf")) else ""
            raise UnsupportedModel(f"{path} is missing; {folder} is not the folder of a transformers checkpoint{hint}")
        try:
            return cls(load_object(read_inside(folder, CONFIG, MAX_CONFIG_NBYTES)))
        except ValueError as error:
            raise UnsupportedModel(f"{path}: not the JSON of a configuration ({error})") from None

    def get(self, name: str) -> Any:
        """A field under its own name or the family's alias; None where neither file nor defaults have it."""
        for key in (name, self.family.aliases.get(name, name)):
            if key in self.values:
                return self.values[key]
        for key in (name, self.family.aliases.get(name, name)):
            if key in self.family.defaults:
                return self.family.defaults[key]
        return None

    def size(self, name: str) -> int:
        """A field that must be a number."""
        value = self.get(name)
        if type(value) is not int:
            raise out_of_range(name, value, "a number")
        return value

    @property
    def is_latent(self) -> bool:
        """Whether layers cache latents (MLA)."""
        return self.family.model_type in LATENT

    @property
    def context(self) -> int:
        """Tokens of the longest sequence: those that positions are made for."""
        return self.size("max_position_embeddings")

    @property
    def is_indexed(self) -> bool:
        """Whether indexers choose the tokens that layers attend to."""
        return self.family.model_type in INDEXED | BLOCK_INDEXED | BLOCK_SPARSE

    @property
    def index_key(self) -> tuple[int, int]:
        """Elements of an indexer's key, and the most tokens that it chooses: of blocks, those behind the last whole
        one, too."""
        if self.family.model_type in BLOCK_INDEXED:
            chosen = self.size("indexer_budget") + self.size("indexer_compress_ratio") - 1
            return self.size("indexer_head_dim"), chosen
        if self.family.model_type in BLOCK_SPARSE:
            return self.size("index_head_dim"), self.size("index_topk_blocks") * self.size("index_block_size")
        return self.size("index_head_dim"), self.size("index_topk")

    @property
    def table_rows(self) -> int:
        """Rows that a layer looks up in a table of n-grams for a token: some for each length from 2 on."""
        return (self.size("ngram_size") - 1) * self.size("heads_per_ngram")

    @property
    def num_experts(self) -> int | None:
        """Experts of a layer, under whichever name; None for a dense family."""
        return self._first(_COUNTS)

    @property
    def experts_per_token(self) -> int:
        """Experts that a token is routed to, under whichever name."""
        count = self._first(_PER_TOKEN)
        if count is None:
            raise out_of_range("num_experts_per_tok", None, "a number, because the files hold experts")
        return count

    def _first(self, names: tuple[str, ...]) -> int | None:
        found: list[int] = [value for name in names if (value := self.get(name))]
        return found[0] if found else None

    def _check_heads(self) -> None:
        self._check_latents() if self.is_latent else self._check_kv_heads()
        if (pad := self.get("pad_token_id")) is not None and pad >= self.size("vocab_size"):
            raise out_of_range("pad_token_id", pad, f"less than vocab_size {self.size('vocab_size')}")

    def _check_latents(self) -> None:
        for name in ("kv_lora_rank", "qk_rope_head_dim"):
            if self.size(name) % 2:
                raise out_of_range(name, self.size(name), "an even number")

        heads = {"qk_head_dim": self.size("qk_nope_head_dim") + self.size("qk_rope_head_dim")}
        if self.family.model_type in TWO_ATTENTIONS:
            heads["head_dim"] = self.size("qk_rope_head_dim")
        for name, wanted in heads.items():
            if (given := self.values.get(name)) not in (None, wanted):
                raise out_of_range(name, given, f"{wanted}, as other fields say")

    def _check_kv_heads(self) -> None:
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        kv_heads = self.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise out_of_range("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads {heads}")
        if hidden % heads and self.family.model_type in _WHOLE_HEADS:
            raise out_of_range("hidden_size", hidden, f"a multiple of num_attention_heads {heads}")
        if self.family.model_type in BLOCK_SPARSE and self.size("index_n_heads") != kv_heads:
            raise out_of_range("index_n_heads", self.size("index_n_heads"), f"num_key_value_heads {kv_heads}")
        if (local := self.get("index_local_blocks") or 0) > (most := self.get("index_topk_blocks") or local):
            raise out_of_range("index_local_blocks", local, f"at most index_topk_blocks {most}")
        if self.get("use_shared_attention_adapter") and kv_heads != heads:
            raise out_of_range("num_key_value_heads", kv_heads, f"{heads}, as wide as adapters of keys and values")
        if self.family.model_type in SHARING and not self.get("tie_word_embeddings"):
            raise out_of_range("tie_word_embeddings", False, "true: without it transformers shares no blocks either")
        if self.family.model_type in SHARING and 2 * hidden % heads:
            raise out_of_range("num_attention_heads", heads, f"a divisor of {2 * hidden}")
        if _usual_head_dim(self) % 2:
            raise out_of_range("head_dim", _usual_head_dim(self), "an even number")

    def _check_layer_types(self) -> None:
        num_layers = self.size("num_hidden_layers")
        for name in ("layer_types", "mlp_layer_types", "no_rope_layers", "num_attention_heads_per_layer"):
            given = self.get(name)
            # Llama 4 takes an empty list as one that was not given.
            absent = given is None or (name == "no_rope_layers" and not given)
            if not absent and len(given) != num_layers:
                raise out_of_range(name, given, f"an item for each of {num_layers} layers")
        kinds = {kind(self, layer) for layer in range(num_layers)} - WITHOUT_WINDOW
        if "chunked_attention" in kinds and self.family.model_type not in CHUNKED:
            raise out_of_range("layer_types", "chunked_attention", "another kind of layer in this family")
        if "sliding_attention" in kinds and self.family.model_type in CHUNKED:
            raise out_of_range("layer_types", "sliding_attention", "another kind of layer in this family")
        field = "attention_chunk_size" if self.family.model_type in CHUNKED else "sliding_window"
        explicit = self.get("layer_types") or self.family.model_type not in OPTIONAL
        if kinds and explicit and not self.get(field):
            raise out_of_range(field, self.get(field), "a number from 1 on, because layers slide")
        if any(window(self, layer) == 0 for layer in range(num_layers)):
            raise out_of_range(field, 0, "a number from 1 on, or null, because layers slide")

    def _check_tables(self) -> None:
        """transformers' class looks for a prime number for each head, from the first one on."""
        layers = self.get("ple_layer_ids") or []
        if layers and (heads := self.table_rows * len(layers)) > MAX_TABLE_HEADS:
            wanted = f"less: {heads} heads in all layers, at most {MAX_TABLE_HEADS} are read"
            raise out_of_range("heads_per_ngram", self.get("heads_per_ngram"), wanted)

    def _check_experts(self) -> None:
        given = {name: self.values[name] for name in _COUNTS if self.values.get(name) is not None}
        if len(set(given.values())) > 1:
            (first, count), (other, found) = list(given.items())[:2]
            raise out_of_range(other, found, f"{first} {count}")
        count, per_token = self.num_experts, self._first(_PER_TOKEN)
        if count is not None and per_token is not None and per_token > count:
            raise out_of_range("num_experts_per_tok", per_token, f"at most num_experts {count}")


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
# Families whose own class wants it, whether head_dim is given or not; others round down where it is not.
_WHOLE_HEADS = {
    "arcee", "aria_text", "gemma3_text", "hyperclovax", "internlm3", "iquestcoder", "jais2", "llama", "persimmon",
}  # fmt: skip


def _refuse_code(value: Any, where: str, depth: int = 0) -> None:
    """Raises UnsupportedModel for private keys and for keys that name code, a kernel or another repository."""
    if depth > MAX_DEPTH:
        raise UnsupportedModel(f"{where}: nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, list):
        for item in value:
            _refuse_code(item, where, depth + 1)
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        # Gemma saves a private number; what names code is a string.
        # transformers writes an infinite number as an object with this field.
        harmless = key == "_name_or_path" or (key == "__float__" and item == "Infinity")
        private = key.startswith("_") and not harmless and not isinstance(item, int | float)
        # Sizes of convolutions, which FIELDS checks, and a flag that is dropped: which kernels run is decided here.
        number = isinstance(item, int | float) and (key in FIELDS or key == "use_mamba_kernels")
        if item is not None and (private or (not number and any(name in key for name in _NAMES_CODE))):
            raise UnsupportedModel(
                f"{where}: {described(key)} names code or is private; moedge runs no code of a checkpoint"
            )
        _refuse_code(item, f"{where}.{key if key.isidentifier() and key.isascii() else ascii(key)}"[:200], depth + 1)


def _dtype(values: Mapping[str, Any]) -> str | None:
    """The dtype that the file names, as torch does; None where it names none that weights are computed in."""
    name = values.get("dtype") or values.get("torch_dtype")
    return name if isinstance(name, str) and name in WEIGHT_DTYPES else None


# Kinds of layers that look back everywhere, keep a state or have no mixer of tokens at all.
WITHOUT_WINDOW = {
    "full_attention", "indexed_attention", "minimax_m3_sparse", "linear_attention", "conv", "moe", "mlp", "attention",
    "mamba", "hybrid",
}  # fmt: skip
# Names in older files, and what they became.
_KIMI = {
    "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob", "num_expert_group": "n_group",
    "num_experts": "num_local_experts", "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}  # fmt: skip
RENAMED: Mapping[str, Mapping[str, str]] = {
    "dots3_note_text": {"sliding_window_size": "sliding_window"},
    "bailing_hybrid": _KIMI,
    "kimi_linear": _KIMI,
    "lfm2": {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
    "lfm2_moe": {"tie_embedding": "tie_word_embeddings"},
    "step3p5": {
        "num_attention_groups": "num_key_value_heads", "moe_num_experts": "n_routed_experts",
        "moe_top_k": "num_experts_per_tok", "share_expert_dims": "share_expert_dim",
    },
    "nemotron_h": {
        "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_dt_min": "time_step_min",
        "mamba_conv_bias": "use_conv_bias", "mamba_chunk_size": "chunk_size", "layer_types": "layers_block_type",
    },
}  # fmt: skip
# transformers ties nothing in these families, whatever their files say.
_NEVER_TIED = {"bailing_hybrid", "kimi_linear", "nemotron_h"}
# Zamba2's layers with a shared block, where its file names no kinds of layers.
_HYBRID = {6, 12, 18, 24, 30, 36, 42, 47, 51}
_LETTERS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}


def _as_now(model_type: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a file under the names of today; the letters of Nemotron-H's layers as a list of kinds."""
    renamed = RENAMED.get(model_type, {})
    found = {renamed.get(name, name): value for name, value in values.items()}
    # The default of all families, and as transformers writes it; dropped with the fields that are not known.
    limit = values.get("time_step_limit")
    if limit is not None and limit not in ([0.0, {"__float__": "Infinity"}], [0.0, math.inf]):
        raise out_of_range("time_step_limit", limit, "0 and infinity")
    if isinstance(inner := found.get("linear_attn_config"), dict):
        found = _kimi_layers(inner, found.get("num_hidden_layers")) | found
    if model_type in INDEXED - {"dots3_note_text"}:
        # All of one kind, which releases of transformers call otherwise.
        found.pop("layer_types", None)
        found |= _indexer_types(values) if found.get("indexer_types") is None else {}
    if model_type in BLOCK_SPARSE:
        found = _block_sparse_layers(found)
    if model_type in SHARING:
        # The width of heads follows from others.
        found = {name: value for name, value in found.items() if name != "head_dim"}
        if found.get("layers_block_type") is None:
            found["layers_block_type"] = ["hybrid" if layer in _HYBRID else "linear_attention" for layer in range(54)]
    if model_type in _NEVER_TIED:
        found["tie_word_embeddings"] = False
    if model_type == "step3p5":
        found = _step_layers(found)
    if model_type == "nemotron_h":
        letters = found.pop("hybrid_override_pattern", None)
        if found.get("layers_block_type") is None and isinstance(letters, str):
            if not set(letters) <= set(_LETTERS):
                raise out_of_range("hybrid_override_pattern", letters, f"letters of {''.join(_LETTERS)}")
            found["layers_block_type"] = [_LETTERS[letter] for letter in letters]
        if isinstance(kinds := found.get("layers_block_type"), list):
            found["num_hidden_layers"] = len(kinds)
    return found


_SPARSE = {
    "sparse_num_index_heads": "index_n_heads", "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size", "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}  # fmt: skip


def _block_sparse_layers(found: dict[str, Any]) -> dict[str, Any]:
    """What MiniMax's own files say of the indexer and the kinds of layers, under the names of today."""
    # The activation is written out, whatever the file calls it.
    found.pop("hidden_act", None)
    inner = found.get("sparse_attention_config")
    inner = inner if isinstance(inner, dict) else {}
    found |= {own: inner[name] for name, own in _SPARSE.items() if name in inner}
    for name, kinds, given in (
        ("layer_types", ("full_attention", "minimax_m3_sparse"), inner.get("sparse_attention_freq")),
        ("mlp_layer_types", ("dense", "sparse"), found.get("moe_layer_freq")),
    ):
        if found.get(name) is None and isinstance(given, list):
            found[name] = [kinds[bool(each)] for each in given]
    return found


def _indexer_types(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Which layers choose tokens themselves, from the fields by which GLM's files say it; nothing where all do."""
    pattern, every = values.get("index_topk_pattern"), values.get("index_topk_freq", 1)
    num_layers = values.get("num_hidden_layers")
    if isinstance(pattern, str) and set(pattern) <= set("FS"):
        return {"indexer_types": ["full" if letter == "F" else "shared" for letter in pattern]}
    if not isinstance(every, int) or every <= 1 or not isinstance(num_layers, int):
        return {}
    offset = values.get("index_skip_topk_offset", 2)
    if not isinstance(offset, int):
        raise out_of_range("index_skip_topk_offset", offset, "a number")
    own = [max(layer - offset + 1, 0) % every == 0 for layer in range(min(num_layers, MAX_LAYERS))]
    return {"indexer_types": ["full" if each else "shared" for each in own]}


def _kimi_layers(inner: Mapping[str, Any], num_layers: object) -> dict[str, Any]:
    """What Kimi Linear's files say of its recurrent layers in an object of their own; layers count from 1 there."""
    names = {
        "head_dim": "linear_head_dim", "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }  # fmt: skip
    found = {name: inner[given] for given, name in names.items() if given in inner}
    attending = inner.get("full_attn_layers")
    if isinstance(attending, list) and isinstance(num_layers, int):
        layers = range(1, min(num_layers, MAX_LAYERS) + 1)
        found["layer_types"] = ["full_attention" if layer in attending else "linear_attention" for layer in layers]
    return found


def _step_layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Step 3.7's fields of today from those of its files, whose lists go on for layers that predict further tokens."""
    found, count = dict(values), values.get("num_hidden_layers")
    for name in ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"):
        if isinstance(found.get(name), list) and isinstance(count, int):
            found[name] = found[name][: max(count, 0)]
    sparse = found.pop("moe_layers_enum", None)
    sparse = [each.strip() for each in sparse.split(",")] if isinstance(sparse, str) else sparse
    if isinstance(sparse, list) and found.get("mlp_layer_types") is None and isinstance(count, int):
        layers = set(map(str, sparse))
        every = range(min(count, MAX_LAYERS))
        found["mlp_layer_types"] = ["sparse" if str(layer) in layers else "dense" for layer in every]
    if isinstance(other := found.pop("attention_other_setting", None), dict):
        found["num_sliding_attention_heads"] = other.get("num_attention_heads")
    thetas, parts = found.get("rope_theta"), found.pop("partial_rotary_factors", None)
    if isinstance(thetas, list) and isinstance(kinds := found.get("layer_types"), list):
        parts = parts if isinstance(parts, list) else [1.0] * len(thetas)
        rope = {
            str(kind): {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part}
            for kind, theta, part in zip(kinds, thetas, parts, strict=False)
        }
        if isinstance(scaling := found.pop("rope_scaling", None), dict) and "full_attention" in rope:
            rope["full_attention"] |= scaling
        found |= {"rope_theta": None, "rope_parameters": rope}
    return found


Kind = str
Rule = Callable[["ModelConfig", int], bool]


def kind(config: ModelConfig, layer: int) -> Kind:
    """How far a layer looks back: everywhere, a window, or to the start of its chunk of positions."""
    kinds = config.get("layer_types")
    if kinds is not None:
        return str(kinds[layer])
    rule = SLIDING.get(config.family.model_type)
    if rule is None or not rule(config, layer):
        return "full_attention"
    return "chunked_attention" if config.family.model_type in CHUNKED else "sliding_attention"


def window(config: ModelConfig, layer: int) -> int | None:
    """Tokens that a layer looks back at most, itself included; None for all."""
    found, family = kind(config, layer), config.family.model_type
    if (found == "full_attention" and family not in FULL_IN_WINDOWS) or config.get("use_sliding_window") is False:
        return None
    if family not in SLIDING or found == "indexed_attention":
        return None
    size: int | None = config.get("attention_chunk_size" if found == "chunked_attention" else "sliding_window")
    return size


def _last_of(period: int, field: str = "") -> Rule:
    """Sliding windows in all layers but the last of every `period`; a field of the config may set the period."""
    return lambda config, layer: (layer + 1) % int((config.get(field) if field else None) or period) != 0


def _first_of(period: int) -> Rule:
    return lambda config, layer: layer % period != 0


def _always(config: ModelConfig, layer: int) -> bool:
    return True


def _never(config: ModelConfig, layer: int) -> bool:
    return False


def _late(config: ModelConfig, layer: int) -> bool:
    return layer >= config.size("max_window_layers")


def _last_of_six_and_ends(config: ModelConfig, layer: int) -> bool:
    return (layer + 1) % 6 != 0 and layer + 1 != config.size("num_hidden_layers")


def _last_of_four_from_the_end(config: ModelConfig, layer: int) -> bool:
    return (config.size("num_hidden_layers") - 1 - layer) % 4 != 0


def _cohere_moe(config: ModelConfig, layer: int) -> bool:
    dense = config.get("first_k_dense_replace") or 0
    if layer < dense:
        return (layer + 1) % (config.get("prefix_dense_sliding_window_pattern") or 1) != 0
    return (layer - dense + 1) % (config.get("sliding_window_pattern") or 4) != 0


def _where_rotary(config: ModelConfig, layer: int) -> bool:
    """llama4: layers with rotary positions are chunked."""
    given = config.get("no_rope_layers")
    return bool(given[layer]) if given else (layer + 1) % (config.get("no_rope_layer_interval") or 4) != 0


# Families in which no window given means that no layer slides.
OPTIONAL = {
    "cwm", "dots1", "exaone4", "exaone_moe", "minimax", "ministral", "ministral3", "mistral", "mixtral", "phi3",
    "phimoe", "qwen2", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3", "qwen3_moe",
    "smollm3", "starcoder2",
}  # fmt: skip
# Families whose sliding layers look back to the start of a chunk instead.
CHUNKED = {"llama4_text"}
# Whose layers that attend, all called full_attention, have the window that the config may give.
FULL_IN_WINDOWS = {"minimax"}
# A family that is not here has no window, whatever its config says.
SLIDING: dict[str, Rule] = {
    "afmoe": _last_of(4, "global_attn_every_n_layers"),
    "beam": _last_of_six_and_ends,
    "cohere2": _last_of(4, "sliding_window_pattern"),
    "cohere2_moe": _cohere_moe,
    "cohere_compass_text": _never,
    "cwm": _first_of(4),
    "dots1": _late,
    "dots3_note_text": lambda config, layer: layer >= 2 and layer % 4 != 1,
    "exaone4": _last_of(4, "sliding_window_pattern"),
    "exaone_moe": _last_of(4, "sliding_window_pattern"),
    "flint": lambda config, layer: layer >= 2 and layer % 4 != 1 and layer + 1 != config.size("num_hidden_layers"),
    "gemma2": _last_of(2),
    "gemma3_text": _last_of(6, "sliding_window_pattern"),
    "gemma4_text": _last_of_six_and_ends,
    "gemma4_unified_text": _last_of_six_and_ends,
    "gpt_oss": _last_of(2),
    "granite_swa": _first_of(4),
    "granitemoe_swa": _first_of(4),
    "kolibri1": _last_of(5),
    "laguna": _never,
    "lara_mini": lambda config, layer: layer % 5 in (1, 4),
    "lfm3": lambda config, layer: layer > 0 and layer % 4 == 0,
    "llama4_text": _where_rotary,
    "mellum": _never,
    "mimo_v2_flash": lambda config, layer: layer != 0 and (layer + 1) % 6 != 0,
    "minimax": _always,
    "muse_glimmer_text": _last_of_four_from_the_end,
    "muse_spark_text": _last_of_four_from_the_end,
    "ministral": _always,
    "ministral3": _always,
    "mistral": _always,
    "mixtral": _always,
    "olmo3": _last_of(4),
    "phi3": _always,
    "phimoe": _always,
    "qwen2": _late,
    "qwen2_5_omni_text": _late,
    "qwen2_5_vl_text": _late,
    "qwen2_vl_text": _late,
    "qwen2_moe": lambda config, layer: (layer + 1) % 2 != 0 and layer < config.size("max_window_layers"),
    "qwen3": _late,
    "qwen3_moe": _always,
    "smollm3": lambda config, layer: not _where_rotary(config, layer),
    "starcoder2": _always,
    "step3p5": _never,
    "vaultgemma": _last_of(2),
}


def kv_heads(config: ModelConfig, layer: int) -> int:
    """Key and value heads of a layer; one where all heads share a latent."""
    if config.is_latent:
        return 1
    heads: int = config.get("num_key_value_heads") or config.size("num_attention_heads")
    sliding = kind(config, layer) == "sliding_attention"
    if config.family.model_type == "mimo_v2_flash" and sliding:
        return 2 * heads
    if config.family.model_type in _GLOBAL_HEADS and not sliding:
        own = _own(config, layer, "num_key_value_heads")
        return own or (config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None) or heads
    return heads


# Families whose layers have two attention modules each; their modules are counted on.
TWO_ATTENTIONS = {"longcat_flash"}


# Families whose layers have one that attends twice, to other values each time.
TWO_CALLS = {"diffllama"}


def sharing_layers(config: ModelConfig) -> list[int]:
    """The layers that have a block in common with others, each the next of `num_mem_blocks`."""
    return [layer for layer in range(config.size("num_hidden_layers")) if kind(config, layer) == "hybrid"]


def attention_modules(config: ModelConfig, layer: int) -> range:
    """The indices of a layer's attention modules, or of their calls, each of which has a cache of its own."""
    count = 2 if config.family.model_type in TWO_ATTENTIONS | TWO_CALLS else 1
    return range(layer * count, (layer + 1) * count)


def _usual_head_dim(config: ModelConfig) -> int:
    # Shared blocks get hidden states and embeddings side by side.
    sides = 2 if config.family.model_type in SHARING else 1
    return int(config.get("head_dim") or sides * config.size("hidden_size") // config.size("num_attention_heads"))


def head_dim(config: ModelConfig, layer: int) -> int:
    """Elements of a layer's keys, or of its values where those are longer; the shorter are padded. Or of a latent."""
    if config.is_latent:
        return latent_size(config, layer, "kv_lora_rank")
    size = _usual_head_dim(config)
    if config.family.model_type in _GLOBAL_HEADS and kind(config, layer) != "sliding_attention":
        return _own(config, layer, "head_dim") or config.get("global_head_dim") or 512
    return max(size, config.get("v_head_dim") or 0)


def latent_size(config: ModelConfig, layer: int, name: str) -> int:
    """A size of a layer with latent attention, whose sliding layers may have their own."""
    own = _own(config, layer, name)
    if own is None and kind(config, layer) == "sliding_attention":
        own = config.get(f"swa_{name}")
    return config.size(name) if own is None else own


# Layers without a window have heads of their own; transformers' class knows the default of 512.
_GLOBAL_HEADS = {"gemma4_text", "gemma4_unified_text"}


def _own(config: ModelConfig, layer: int, name: str) -> int | None:
    """Reads the settings by layer that newer releases write instead of the `global` fields."""
    layers = config.get("per_layer_config") or {}
    for index, settings in layers.items():
        if int(index) == layer:
            found: int | None = settings.get(name)
            return found
    return None
