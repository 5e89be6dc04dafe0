"""ModelShape: everything that memory planning needs to know of a checkpoint. See docs/dev/model-shape.md."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...offload.typed_json import read_as


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight that computes `x @ W.T`: `rows` outputs by `cols` inputs.

    Of a quantized checkpoint: `kept` is the weight format that has its codes and scales as they are, empty where none
    has, and `bits` those of a code; 0 for floats.
    `unpacked`: it keeps the model's dtype in every weight format, because parts of it are multiplied with. `uses` is
    how often a token is: layers may share it.
    """

    name: str
    rows: int
    cols: int
    kept: str = ""
    bits: int = 0
    unpacked: bool = False
    uses: int = 1

    @property
    def numel(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """The experts of one layer, each with two matrices: `up` ([gate;] up, fused if the model has both) and `down`."""

    count: int
    per_token: int
    up: Matrix
    down: Matrix

    @property
    def numel(self) -> int:
        """Elements of one expert."""
        return self.up.numel + self.down.numel


@dataclass(frozen=True, slots=True)
class RowTable:
    """A matrix of `rows` by `cols` that stays on the disk: of each token `per_token` rows are looked up."""

    rows: int
    cols: int
    per_token: int

    @property
    def numel(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One decoder layer: `dense` matrices and experts stream, `resident_numel` elements (norms, routers) stay."""

    index: int
    dense: tuple[Matrix, ...]
    experts: ExpertsShape | None
    resident_numel: int
    table: RowTable | None = None

    @property
    def streamed_numel(self) -> int:
        experts = self.experts.count * self.experts.numel if self.experts else 0
        return sum(matrix.numel for matrix in self.dense) + experts


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose cached keys and values have the same shape; `window` is in tokens, None for full attention.

    Layers with latent attention have a `rope_dim`: they cache one latent of `head_dim` elements, and one rotated key of
    `rope_dim` elements, for all `query_heads`.

    A group may also be the indexers of layers that are in another group (sparse attention): they cache one key of
    `head_dim` elements and no value, and choose the `chosen` tokens that each token attends to.
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window: int | None
    rope_dim: int | None = None
    query_heads: int | None = None
    chosen: int | None = None

    @property
    def is_index(self) -> bool:
        return self.chosen is not None

    @property
    def value_dim(self) -> int:
        """Elements of what is cached as a value; 0 for none."""
        if self.is_index:
            return 0
        return self.head_dim if self.rope_dim is None else self.rope_dim

    @property
    def is_latent(self) -> bool:
        return self.rope_dim is not None

    @property
    def is_plain(self) -> bool:
        """Whether these are keys and values of heads, and no indexer's."""
        return not (self.is_latent or self.is_index)

    @property
    def absorbed_width(self) -> float:
        """Elements that one token's queries and sums over latents have, on average of both; 0 without latents."""
        return (self.query_heads or 0) * (self.head_dim + (self.rope_dim or 0) / 2)

    def first_visible(self, position: int) -> int:
        """The first position whose key the token at `position` attends to."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Recurrent layers whose states have the same shape; a sequence has one state in each, whatever its length.

    `conv` [C, K - 1] are the last inputs of a causal convolution over K tokens, in the model's dtype; empty for layers
    that only scan. `recurrent` is the shape of the state of a scan, in float32; empty for layers that only convolve.
    """

    layers: tuple[int, ...]
    conv: tuple[int, ...]
    recurrent: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """Elements of a token that are mixed: C or, without a convolution, those of queries, keys and values."""
        return self.conv[0] if self.conv else 3 * self.recurrent[0] * self.recurrent[-1]


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """Tensors of a group, such as experts, that lie in the checkpoint in one format: their elements and their bytes.

    `kept` is the weight format that has their codes as they are; None for floats, empty for what must be widened.
    """

    group: str
    format: str
    numel: int
    nbytes: int
    kept: str | None = None

    @property
    def bits(self) -> float:
        """Bits of the files for each element, scales included."""
        return 8 * self.nbytes / self.numel

    @property
    def becomes(self) -> str:
        """What happens to them where the model is loaded as it is stored."""
        if self.kept is None:
            return "read as they are"
        return f"kept as {self.kept}" if self.kept else "widened, and packed again"


@dataclass(frozen=True)
class ModelShape:
    """A checkpoint as shards, elements and cache groups. `head` is None where it is tied to the embedding.

    Layers pass `streams` residual streams on, each of `hidden` elements. `stored` says what lies in its files.
    `widened_nbytes` are the bytes there of the largest quantized matrix, which are read as one; 0 where none is
    quantized. `own_code` says that the checkpoint names code of its own, which is not run, `mtp` that the last layer is
    a head that drafts tokens.
    """

    model_type: str
    dtype: str
    hidden: int
    vocab: int
    context: int
    layers: tuple[LayerShape, ...]
    kv_groups: tuple[KVGroup, ...]
    head: Matrix | None
    resident_numel: int
    stored: tuple[StoredFormat, ...] = ()
    widened_nbytes: int = 0
    state_groups: tuple[StateGroup, ...] = ()
    own_code: bool = False
    streams: int = 1
    mtp: bool = False

    def __hash__(self) -> int:
        # All layers take longer than what is looked up by a shape is worth.
        return hash((self.model_type, self.hidden, self.vocab, self.resident_numel))

    @property
    def embedding_numel(self) -> int:
        return self.vocab * self.hidden

    @cached_property
    def num_experts(self) -> int:
        """Experts of all layers together."""
        return sum(layer.experts.count for layer in self.layers if layer.experts)

    @cached_property
    def experts(self) -> tuple[ExpertsShape, ...]:
        """The kinds of experts that layers have."""
        return tuple({layer.experts: None for layer in self.layers if layer.experts})

    @cached_property
    def tables(self) -> tuple[RowTable, ...]:
        """The matrices of layers that stay on the disk."""
        return tuple(layer.table for layer in self.layers if layer.table)

    @cached_property
    def parameters(self) -> int:
        """Number of all elements; tied ones count once."""
        layers = sum(layer.streamed_numel + layer.resident_numel for layer in self.layers)
        layers += sum(table.numel for table in self.tables)
        return layers + self.embedding_numel + (self.head.numel if self.head else 0) + self.resident_numel

    @property
    def active_parameters(self) -> int:
        """Elements that one token is multiplied with: gathered embedding rows are not, a tied head is."""
        idle = sum(
            (layer.experts.count - layer.experts.per_token) * layer.experts.numel
            for layer in self.layers
            if layer.experts
        )
        looked_up = (self.embedding_numel if self.head else 0) + sum(table.numel for table in self.tables)
        return self.parameters - idle - looked_up


def shape_from_json(values: dict[str, Any]) -> ModelShape:
    """Raises KeyError, TypeError or ValueError for anything that `asdict` did not give."""
    shape: ModelShape = read_as(ModelShape, values)
    return shape
