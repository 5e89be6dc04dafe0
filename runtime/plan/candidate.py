"""One way to run a job, with its bytes: a pass of some tokens and sequences over a KV cache. Closed form, torch-free.

A formula gives the bytes of the cache, and of what a pass computes with; tests compare it with measured peaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul

from ...moe.expected_rows import most_rows
from ...offload.machine.hardware import num_workers
from ...quant.formats.format import TILES, get_format
from ...quant.kernels import tuning
from ...quant.kernels.gpu import Gpu
from ...quant.matmul import row_layouts
from ...quant.native import library
from ...quant.native.library import CONSTANTS
from ...quant.scratch import fused_row_nbytes, whole_vectors
from ..attention.choice import EXPANDED_NBYTES, GATHERED_NUMEL, PARTIALS_NBYTES, ROWS, SCORED_NUMEL
from ..kv.spec import BLOCK_TOKENS, SCAN_TOKENS, SCANNED_TOKENS, STEP_NBYTES, KVSpec, StateSpec, state_format
from ..settings.settings import MIB, MemoryBudget, encoder_nbytes, process_nbytes
from ..shape.model_shape import ExpertsShape, LayerShape, Matrix, ModelShape
from ..shape.shards import (
    ITEM_NBYTES,
    ModelShards,
    copied_nbytes,
    helper_nbytes,
    model_shards,
    resident_nbytes,
    workspace_nbytes,
)
from .placement import minimum, on_device_nbytes

# What allocators keep beside what is asked of them: a share of the activations, and a constant. With 48 MiB a job of
# 128 sequences in 2.5 GiB peaked 7 MiB above its budget (bench/results/log.md); what torch's allocator keeps of a
# device in 50 mixed passes is simulated to stay within both (tests/support/device/segments.py). The share is assumed.
SLACK_SHARE = 0.25
SLACK_NBYTES = 72 * MIB


def largest(most: int, holds: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` for which `holds`, which is true up to some number; 1 where it never is."""
    low, high = 1, max(most, 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


# Tokens of a block that are tried: large blocks are moved and gathered better, small ones waste fewer positions.
BLOCKS = (4, 8, 16, BLOCK_TOKENS)
MOST_WASTE = 0.03


def choose_block(mean_tokens: float) -> int:
    """Tokens per block, for sequences of `mean_tokens` in the mean over their lives.

    The last block of a sequence has (block - 1) / 2 empty positions in the mean.
    """
    fitting = [block for block in BLOCKS if (block - 1) / 2 <= MOST_WASTE * (mean_tokens + (block - 1) / 2)]
    return max(fitting, default=min(BLOCKS))


@dataclass(frozen=True)
class CacheSize:
    """A cache whose sequences may each grow to `longest` tokens, in passes of `tokens_per_pass`.

    Groups differ: layers with a window need the window of every sequence and the tokens of one pass, however long the
    texts are.
    """

    specs: tuple[KVSpec, ...]
    longest: int
    tokens_per_pass: int

    def blocks(self, num_sequences: int) -> tuple[int, ...]:
        """Blocks by group with which none of `num_sequences` ever waits for another."""
        return tuple([min(num_sequences * whole, num_sequences * each + all) for whole, each, all in self._blocks])

    def nbytes(self, num_sequences: int) -> int:
        """Bytes of those blocks."""
        return self.nbytes_of(self.blocks(num_sequences))

    def nbytes_of(self, blocks: tuple[int, ...]) -> int:
        """Bytes of `blocks`, a number for each group."""
        return sum(map(mul, blocks, self._block_nbytes))

    def parked(self, blocks: tuple[int, ...], free_nbytes: int) -> tuple[int, ...]:
        """Blocks by group for preempted sequences: as many as the cache has, or as fit into `free_nbytes`."""
        nbytes = self.nbytes_of(blocks)
        return tuple(min(count, count * free_nbytes // nbytes) for count in blocks)

    def sequences_in(self, free_nbytes: int, most: int) -> int:
        """The most sequences, up to `most`, whose blocks fit into `free_nbytes`; at least 1."""
        if all(spec.group.window is None for spec in self.specs):
            return max(1, min(most, free_nbytes // self.nbytes(1)))
        return largest(most, lambda count: self.nbytes(count) <= free_nbytes)

    @cached_property
    def _blocks(self) -> tuple[tuple[int, int, int], ...]:
        """By group: blocks of a whole sequence; blocks of what it attends to, and of the tokens of a pass."""
        return tuple(
            (spec.blocks_for(self.longest), spec.least_blocks(self.longest), spec.blocks_for(self.tokens_per_pass))
            for spec in self.specs
        )

    @cached_property
    def _block_nbytes(self) -> tuple[int, ...]:
        return tuple(spec.block_nbytes for spec in self.specs)


# The matrix of a layer that its own inputs go through, and the copies of them, in the dtype and in float32, that live
# at once where those of all layers are made before the first.
_LAYER_INPUT = "per_layer_input_gate"
_INPUT_COPIES, _FP32_INPUT_COPIES = 4, 2
# Copies of [T, D] that live at once in a decoder layer: residual, normed (also in fp32), attention in and out.
_HIDDEN_COPIES = 6
_FP32_COPIES = 2
# The sampler works in tiles of at most this size.
SAMPLER_NBYTES = 64 << 20
# On a CPU a plane of fp32 then stays below 1 MiB and in the cache: larger ones are mapped anew each time.
CPU_SAMPLER_NBYTES = 24 << 20


@dataclass(frozen=True, slots=True)
class Widest:
    """The largest sizes that any layer has; activations are sized by them.

    `sums` is the width of attention's sums over the cache, of all heads; `expanded` that of one head's key and value
    together where they are expanded from latents, else 0. `index` are the elements of an indexer's key, of which each
    token attends to `chosen` tokens; 0 without one. `inputs` are the numbers of a token that layers get as inputs of
    their own, all layers together (Gemma 4).
    """

    hidden: int
    vocab: int
    kv: int
    dense: int
    inner: int
    per_token: int
    num_experts: int
    sums: int
    expanded: int
    index: int = 0
    chosen: int = 0
    inputs: int = 0

    @classmethod
    def of(cls, shape: ModelShape) -> Widest:
        dense = max((matrix.rows for layer in shape.layers for matrix in layer.dense), default=0)
        latent = [group for group in shape.kv_groups if group.is_latent]
        return cls(
            shape.hidden,
            shape.vocab,
            max(group.kv_heads * group.head_dim + (group.rope_dim or 0) for group in shape.kv_groups),
            dense,
            max((each.up.rows for each in shape.experts), default=0),
            max((each.per_token for each in shape.experts), default=0),
            max((each.count for each in shape.experts), default=0),
            max([dense, *((group.query_heads or 0) * (group.head_dim + (group.rope_dim or 0)) for group in latent)]),
            max((_head_width(shape) + (group.rope_dim or 0) for group in latent), default=0),
            max((group.head_dim for group in shape.kv_groups if group.is_index), default=0),
            max((group.chosen or 0 for group in shape.kv_groups), default=0),
            sum(each.rows for layer in shape.layers for each in layer.dense if each.name == _LAYER_INPUT),
        )


def _head_width(shape: ModelShape) -> int:
    """Elements of the key and the value of one head that are made from a latent."""
    heads = max(group.query_heads or 1 for group in shape.kv_groups)
    return max((each.rows for layer in shape.layers for each in layer.dense if each.unpacked), default=0) // heads


def pass_nbytes(widest: Widest, dtype: str, num_tokens: int, num_sampled: int, longest: int) -> int:
    """Bytes of activations and logits, and of the scratch of prompts' attention, in a pass of `num_tokens` tokens.

    `num_sampled` rows get logits; `longest` is the longest sequence, whose keys and values are gathered.
    """
    item, layer = ITEM_NBYTES[dtype], _layer_nbytes(widest, dtype, num_tokens)
    inputs = num_tokens * widest.inputs
    layer = max(layer + inputs * item, inputs * (_INPUT_COPIES * item + 4 * _FP32_INPUT_COPIES))
    # Twice, since some families cap them (final_logit_softcapping).
    logits = 2 * num_sampled * widest.vocab * item + SAMPLER_NBYTES
    gathered = 2 * longest * widest.kv * item
    # Latents are restored in float32 and expanded, for at least one head at a time, with copies (attention/latent.py).
    latents = 2 * longest * widest.kv * 4 + max(EXPANDED_NBYTES, 4 * longest * widest.expanded * item)
    # One sequence of a prompt, keys and values twice.
    indexed = _indexed_nbytes(widest, num_tokens, longest) if longest > widest.chosen > 0 else 0
    return max(layer, logits) + 2 * gathered + (latents if widest.expanded else 0) + indexed


def _layer_nbytes(widest: Widest, dtype: str, num_tokens: int) -> int:
    """Bytes of a decoder layer's activations."""
    item, hidden = ITEM_NBYTES[dtype], num_tokens * widest.hidden
    rows = most_rows(num_tokens, widest.per_token, widest.num_experts)
    return (
        _HIDDEN_COPIES * hidden * item
        + _FP32_COPIES * hidden * 4
        + 3 * num_tokens * widest.dense * item
        + rows * widest.hidden * item
        + 3 * num_tokens * widest.inner * item
    )


# Rows of a pass whose layers are replayed as CUDA graphs (kernels of larger passes take longer than their launches);
# for how many numbers of rows at a time; and the driver's bytes of a graph. On an H200 the first 96 graphs took 70 MiB,
# 58 of them memory that they share, others 30 and 16 MiB (bench/results/gpu.md).
GRAPH_ROWS, GRAPH_SIZES, GRAPH_NBYTES = 512, 6, 320 << 10


def may_graph(shape: ModelShape, gpu: Gpu | None, deterministic: bool) -> bool:
    """Whether a device may replay layers as graphs where it holds them: nothing in them waits, or keeps states."""
    if gpu is None or deterministic or shape.state_groups or not all(group.is_plain for group in shape.kv_groups):
        return False
    return has_products(gpu) and not gpu.lacks.attention


def graphs_nbytes(shape: ModelShape, dtype: str) -> int:
    """Bytes of graphs on a device: the memory that all share, buffers between them, and the driver's own."""
    widest = Widest.of(shape)
    buffers = GRAPH_ROWS * 3 * (widest.hidden + widest.dense) * ITEM_NBYTES[dtype]
    return _layer_nbytes(widest, dtype, GRAPH_ROWS) + buffers + GRAPH_SIZES * 2 * len(shape.layers) * GRAPH_NBYTES


def _indexed_nbytes(widest: Widest, num_tokens: int, longest: int) -> int:
    """Bytes of an indexer's choice (attention/latent.py): products, scores and masks of a tile of rows, with the best
    and their positions sorted out, the keys of a sequence twice, and what was chosen for every token."""
    tile = min(num_tokens, ROWS) * (4 * 4 * longest + 3 * 4 * widest.chosen)
    return 2 * 4 * SCORED_NUMEL + tile + 2 * 4 * longest * widest.index + 4 * num_tokens * widest.chosen


def decoding_nbytes(widest: Widest, dtype: str, num_sequences: int, longest: int) -> int:
    """Bytes that attention on a CPU takes for tokens that are decoded, beside `pass_nbytes`.

    These are gathered keys and values, and a copy of latents; their products in float32, of which softmax has two more;
    or the partial results of the library's kernels, and sums of either.
    """
    gathered = min(GATHERED_NUMEL, num_sequences * longest * widest.kv) * (3 * ITEM_NBYTES[dtype] + 8)
    pieces = num_sequences * (longest // CONSTANTS["split"] + 1)
    parts = min(PARTIALS_NBYTES, pieces * CONSTANTS["rows"] * widest.sums * 4)
    return max(gathered, parts) + 3 * num_sequences * widest.sums * 4


# Bytes of one tile of rows (operands.Pages), and of a token's slot.
_TILE_NBYTES, _SLOT_NBYTES = 20, 8


def has_products(gpu: Gpu) -> bool:
    """Whether a kernel of the device multiplies by packed matrices, of experts that arrive together in one launch."""
    return tuning.supports(gpu.capability) and not gpu.lacks.experts


def experts_nbytes(shape: ModelShape, dtype: str, num_tokens: int) -> int:
    """Bytes of what an expert's first matrix gives to its second, for all rows of a pass: [P, I]."""
    numels = [most_rows(num_tokens, each.per_token, each.count) * each.down.cols for each in shape.experts]
    return max(numels, default=0) * ITEM_NBYTES[dtype]


_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_DENSE = {"gate_proj", "up_proj", "down_proj"}


def may_fuse(dense: Sequence[Matrix], experts: ExpertsShape | None) -> bool:
    """Whether the library's steps may compute layers of these matrices as a whole; the loaded modules decide."""
    return {matrix.name.rpartition(".")[2] for matrix in dense} == _PROJECTIONS | (set() if experts else _DENSE)


def fuses(quant: str, dtype: str, deterministic: bool) -> bool:
    """Whether the library's steps exist here and take these formats."""
    if deterministic or dtype != "bf16" or not library.available():
        return False
    dense = get_format(get_format(quant).parts[0])
    return TILES in dense.orders or (dense.codes == "none" and row_layouts.reads_floats())


# Rows of the pass in which loading compares the steps with the model's own layers (model/fused/selftest.py).
SELFTEST_ROWS = 16


def fused_nbytes(shape: ModelShape, num_tokens: int, *, experts_stream: bool = False) -> int:
    """Bytes at most of the buffers in which the library's steps compute decoder layers of `num_tokens` rows, and those
    of the self-test at load. Layers of the same sizes share them."""

    def of_row(layer: LayerShape) -> int:
        experts, dense = layer.experts, [(matrix.rows, matrix.cols) for matrix in layer.dense]
        if not may_fuse(layer.dense, experts):
            return 0
        if experts is None:
            return fused_row_nbytes(dense, shape.hidden)
        inner = 0 if experts_stream else experts.down.cols
        return fused_row_nbytes(dense, experts.up.cols, experts.per_token, inner, experts.count)

    def sizes(layer: LayerShape) -> tuple[object, ...]:
        experts = layer.experts
        matrices = (*layer.dense, experts.up, experts.down) if experts else layer.dense
        routing = (experts.count, experts.per_token) if experts else ()
        return *routing, *((each.rows, each.cols) for each in matrices)

    return max(num_tokens, SELFTEST_ROWS) * sum({sizes(layer): of_row(layer) for layer in shape.layers}.values())


def attention_nbytes(widest: Widest, cache: CacheSize, dtype: str, num_sequences: int, gpu: Gpu) -> int:
    """Bytes of Triton's attention: transformed queries and keys, prompts that are read back, splits, tables."""
    item, tokens, queries = ITEM_NBYTES[dtype], cache.tokens_per_pass, widest.dense
    transformed = prompts = splits = tables = 0
    for spec in cache.specs:
        width = spec.group.kv_heads * spec.group.head_dim
        transformed = max(transformed, 2 * tokens * (queries + width) * 4 * spec.layout.format.keys.quantized)
        # A copy of queries and results, and keys and values in float32.
        prompts = max(prompts, tokens * (queries * (4 + 2 * item) + 2 * width * (6 + item)))
        # Sums of twice as many programs as there are processors, float32 with maximum and total.
        heads = -(-queries // width)
        splits = max(splits, 2 * gpu.processors * heads * (spec.group.head_dim + 2) * 4)
        tables += num_sequences * spec.blocks_for(cache.longest) * 4 + tokens * (2 * _TILE_NBYTES + 2 * _SLOT_NBYTES)
    return transformed + prompts + splits + tables


# What a scan has of a prompt's piece at once in float32, in multiples of its inputs and outputs: copies of all of them
# that are repeated by head and padded, and what a chunk gives to the next one. Of states: gathered, decayed, added to.
_SCAN_COPIES = 8
_STATE_COPIES = 5


def scan_nbytes(shape: ModelShape, dtype: str, num_tokens: int, num_sequences: int) -> int:
    """Bytes of what the scan of a recurrent layer takes: a piece of a prompt, or one token of many sequences."""
    spec = StateSpec(shape.state_groups, dtype)
    if not spec.groups:
        return 0
    tokens = min(num_tokens, SCANNED_TOKENS)
    piece = 0
    for group in spec.groups:
        heads, widths = (group.recurrent[0], sum(group.recurrent[1:])) if group.recurrent else (0, 0)
        scores = 4 * tokens * SCAN_TOKENS * heads
        # Mamba-1 has a head for every channel and goes token by token.
        repeated = tokens * heads * widths if len(group.recurrent) > 2 else 0
        piece = max(piece, _SCAN_COPIES * (repeated + tokens * group.width) * 4 + (scores if repeated else 0) * 4)
    states = _STATE_COPIES * min(max(1, num_sequences) * spec.largest_nbytes, max(STEP_NBYTES, spec.largest_nbytes))
    # Outputs of a pass stay while pieces are computed.
    return piece + states + 2 * num_tokens * max(group.width for group in spec.groups) * 4


class WeightFootprint:
    """A model in one weight format on the tier that computes: what takes the same bytes in every candidate.

    `process` bytes are the process, or a device's context; `resident` bytes are small parameters; products use
    `workspace` bytes of scratch. `graphs` bytes are of a device that replays all layers, 0 where it may not.
    """

    def __init__(self, shape: ModelShape, quant: str, dtype: str, deterministic: bool, budget: MemoryBudget) -> None:
        self.shape = shape
        self.quant = quant
        self.dtype = dtype
        self.deterministic = deterministic
        self.shards: ModelShards = model_shards(shape, quant, dtype)
        self.widest = Widest.of(shape)
        device = budget.device
        self.on_device = device is not None
        self.pads_passes = deterministic and not self.on_device
        self.gpu = None if device is None else device.gpu
        self.grouped_products = self.gpu is not None and has_products(self.gpu)
        self.graphs = graphs_nbytes(shape, dtype) if may_graph(shape, self.gpu, deterministic) else 0
        self.workspace = workspace_nbytes(shape, quant, dtype, deterministic)
        if device is None:
            self.workspace += (num_workers() - 1) * helper_nbytes(shape, quant, dtype, deterministic)
            self.process = max(process_nbytes(), budget.taken_nbytes)
            always = resident_nbytes(shape, dtype)
            # An embedding that is no head lies in memory where all weights do; else its rows are looked up on the disk.
            self.looked_up = shape.embedding_numel * ITEM_NBYTES[dtype] if self.shards.head else 0
            self.resident = always - self.looked_up
        else:
            self.process, self.looked_up = device.context_nbytes, 0
            self.resident = on_device_nbytes(shape, self.shards, dtype)

    def graphs_within(self, nbytes: int) -> int:
        """The bytes of graphs, 0 where they are more than `nbytes`."""
        return self.graphs if self.graphs <= nbytes else 0

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return self.shards.nbytes

    @property
    def whole_nbytes(self) -> int:
        """Bytes of memory without which something streams: all weights, and an embedding that is looked up."""
        return self.nbytes + self.looked_up

    @cached_property
    def copied_nbytes(self) -> int:
        """Bytes that are written to disk before any weight can stream from there."""
        return copied_nbytes(self.shape, self.quant, self.dtype)

    @cached_property
    def streaming_nbytes(self) -> int:
        """The least that weights take: everything streams that can."""
        least = minimum(self.shards).nbytes(self.shards)
        return least if least < self.nbytes else self.whole_nbytes


class Candidate:
    """Passes of `tokens_per_pass` tokens and at most `live` sequences, over a cache. `rows` get logits: one for each
    sequence, or more.

    The sizes are those of the tier that computes. `fixed` bytes are needed whatever is held; `scratch` is the part of
    them that a pass computes with: `workspace`, `activations` and `slack`. `states` are those of recurrent layers,
    with the snapshots of prefixes.
    """

    def __init__(self, weights: WeightFootprint, cache: CacheSize, live: int, rows: int = 0) -> None:
        self.weights = weights
        self.cache = cache
        self.tokens_per_pass = cache.tokens_per_pass
        self.live = max(1, min(live, self.tokens_per_pass))
        self.rows = max(self.live, rows)
        self.activations = self._activations()
        self.slack = int(self.activations * (1 + SLACK_SHARE)) - self.activations + SLACK_NBYTES
        self.scratch = weights.workspace + self.activations + self.slack
        # Unlike blocks, which grow with a sequence, its states are there from its first token on.
        format = state_format(cache.specs[0].format, weights.deterministic)
        self.states = StateSpec(weights.shape.state_groups, weights.dtype, format).pool_nbytes(self.live)
        # Of one prompt, which is encoded in host memory while passes run.
        self.encoder = 0 if weights.on_device else encoder_nbytes(cache.longest)
        self.fixed = self.scratch + weights.process + weights.resident + self.states + self.encoder

    def with_rows(self, rows: int) -> Candidate:
        """The same where so many rows get logits."""
        return Candidate(self.weights, self.cache, self.live, rows)

    @property
    def smallest(self) -> int:
        """The least budget: one sequence, and everything streams that can."""
        return self.fixed + self.cache.nbytes(1) + self.weights.streaming_nbytes

    @property
    def smallest_whole(self) -> int:
        """The least budget that holds all weights, and one sequence."""
        return self.fixed + self.cache.nbytes(1) + self.weights.whole_nbytes

    def whole(self, num_sequences: int) -> int:
        """The budget that holds all weights, and `num_sequences` at their longest."""
        return self.fixed + self.cache.nbytes(num_sequences) + self.weights.whole_nbytes

    def _activations(self) -> int:
        weights, cache = self.weights, self.cache
        decoding = decoding_nbytes(weights.widest, weights.dtype, self.rows, cache.longest)
        # Not at the same time: a layer's attention is over when its experts begin, and one backend computes it.
        if weights.gpu is not None and not weights.gpu.lacks.attention:
            attention = attention_nbytes(weights.widest, cache, weights.dtype, self.live, weights.gpu)
            decoding = max(decoding, attention)
        if weights.grouped_products:
            decoding = max(decoding, experts_nbytes(weights.shape, weights.dtype, self.tokens_per_pass))
        rows = whole_vectors(self.tokens_per_pass) if weights.pads_passes else self.tokens_per_pass
        scan = scan_nbytes(weights.shape, weights.dtype, rows, self.live)
        # What a head reads of a pass, until it has drafted behind it.
        kept = weights.shape.mtp * rows * weights.shape.hidden * ITEM_NBYTES[weights.dtype]
        return kept + decoding + scan + pass_nbytes(weights.widest, weights.dtype, rows, self.rows, cache.longest)
