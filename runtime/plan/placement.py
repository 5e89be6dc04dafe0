"""The plan and its workload, and the tier of every weight shard. Closed form, torch-free.

KV before experts: while weights do not fit, a byte gives more tokens per second as KV cache, which adds sequences to
every pass, than as a held expert (docs/dev/internals.md). So `choose_placement` divides the bytes that cache and
scratch leave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import mul
from typing import Any, Self

from ...moe.division import ExpertSeconds
from ...offload.budget import GIB
from ...offload.memory import KEPT_NBYTES
from ...offload.typed_json import read_as
from ..kv.cohorts import CohortSizes
from ..settings.errors import DoesNotFit
from ..settings.settings import MIB, DeviceBudget, MemoryBudget
from ..shape.model_shape import ModelShape
from ..shape.shards import ITEM_NBYTES, ModelShards, resident_nbytes

# Slots for streamed experts: enough in flight that the disk never waits for compute, a small part of any budget.
RING_EXPERTS = 24
MIN_RING_EXPERTS = 3
# While threads compute on some experts of a ring others arrive, so a small one makes the disk wait for compute and
# compute for the disk. Measured from 3 experts to 24: from this many on nothing waits (bench/results/log.md).
DEEP_RING_EXPERTS = 8
# A layer computes while the next one's dense shard arrives.
RING_LAYERS = 2
# Weights of the checkpoint while they are quantized, and the buffers that a shard passes through.
LOADING_NBYTES = 512 * MIB


@dataclass(frozen=True, slots=True)
class Workload:
    """`sequences` of at most `longest` tokens, prompt included.

    `shortest` is the least that any of them needs. `prompt_tokens` and `generated_tokens`, the latter at most, are sums
    over all of them. None means that it is not known.
    """

    sequences: int
    longest: int
    shortest: int | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None

    @property
    def least(self) -> int:
        """Tokens that the cache must hold for the job to make sense."""
        return self.longest if self.shortest is None else self.shortest

    @property
    def mean_prompt(self) -> float:
        """Prompt tokens of a sequence."""
        return self.longest / 2 if self.prompt_tokens is None else self.prompt_tokens / self.sequences

    @property
    def mean_generated(self) -> float:
        """Tokens to generate for a sequence, at most."""
        if self.generated_tokens is None:
            return max(1.0, self.longest - self.mean_prompt)
        return max(1.0, self.generated_tokens / self.sequences)

    @property
    def mean_live(self) -> float:
        """Tokens that a sequence holds, averaged over its life, if answers end halfway."""
        return self.mean_prompt + self.mean_generated / 4


@dataclass(frozen=True, slots=True)
class Placement:
    """`held_dense` layers keep their dense shard, the first of `ModelShards.dense_order`, and `held_experts` is how
    many experts each layer keeps.

    `dense_ring` and `expert_ring` are bytes of the rings that the other shards stream through, 0 where none do.
    """

    held_dense: int
    held_experts: tuple[int, ...]
    dense_ring: int
    expert_ring: int

    @property
    def ring_nbytes(self) -> int:
        """Bytes of both rings."""
        return self.dense_ring + self.expert_ring

    def held_nbytes(self, shards: ModelShards) -> int:
        """Bytes of the shards that are held; the output head is one of them."""
        experts: int = sum(map(mul, self.held_experts, shards.expert_nbytes))
        return shards.held_nbytes[self.held_dense] + experts + (shards.head.nbytes if shards.head else 0)

    def missing_experts(self, shards: ModelShards) -> Counter[tuple[float, int, int]]:
        """Layers with experts by the share of them that a token asks for, how many are not held, and bytes of one."""
        layers = zip(shards.layers, self.held_experts, strict=True)
        return Counter(
            (each.per_token / each.num_experts, each.num_experts - held, each.expert.nbytes)
            for each, held in layers
            if each.expert
        )

    def nbytes(self, shards: ModelShards) -> int:
        """Bytes of memory that weights take: held, and in flight."""
        return self.held_nbytes(shards) + self.dense_ring + self.expert_ring


@dataclass(frozen=True, slots=True)
class HostStaging:
    """The host memory of the shards that a device does not hold.

    `placement` counts the device's own shards as kept. `staged_nbytes` of the others are in host memory and
    `disk_nbytes` on disk. `free_nbytes` of the host's budget are left.
    """

    placement: Placement
    staged_nbytes: int
    disk_nbytes: int
    free_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every decision about a run; nothing is left to decide later.

    `placement` and the sizes, in bytes, are those of the tier that computes: host memory, or a device where `budget`
    has one. Then `staging` says where in the host the other shards are.

    - `kv_blocks` is by layer group, enough for `kv_sequences` at their longest. `kv_tokens` is the longest sequence
      that is ever started.
    - `host_kv` are cohorts of sequences whose keys and values lie in host memory. They cross the link in every pass, or
      the CPU attends to them.
    - `cpu_experts` are the seconds by which the engine divides a layer's experts that are not held between the link and
      the CPU; None: all cross it. `cpu_experts_nbytes` of host memory are for rows of those that the CPU computes.
    - `parked_blocks`, by group too, hold preempted sequences in host memory; where there are none, preempted sequences
      are computed again. Without a device there are none, because the cache is in host memory itself, and blocks do
      more good there.
    - `process_nbytes` are the process, or a device's context; `resident_nbytes` are small parameters.
    - `weights_nbytes` are all weights, `held_nbytes` the held ones.
    - `workspace_nbytes`, `activations_nbytes` and `slack_nbytes` are what a pass computes with.
    - `states_nbytes` are states of recurrent layers: those of `max_sequences`, and snapshots where prefixes end.
      A prompt is cut at multiples of `prompt_cut`.
    - `tables_nbytes` of tables stay on the disk in every plan. A token looks up `token_rows_nbytes` there, rows of
      tables and of the embedding where weights stream; what is read is less by rows that were kept or looked up twice,
      and more by the blocks around them.
    - `encoder_nbytes` of host memory are for tokenizing one prompt while passes run.
    - `kept_nbytes` of memory that one pass frees stay in the process for the next one, where the budget has them.
    - `fused_nbytes` are buffers for decoder layers that the library of CPU kernels computes, in memory that nothing
      else could use, or instead of a few experts where experts stream. `graphs_nbytes` of a device are for layers that
      it replays as CUDA graphs. `free_nbytes` of the host's budget are of no use to this job.
    - `grouped_products` says whether kernels of the device compute experts that arrive together in two launches, and
      `stores_by_kernel` whether one of them writes keys and values into the cache, `draws_by_kernel` whether one draws
      tokens.
    - With 2**i sequences or more, a pass of up to `free_tokens[i]` generated and drafted tokens takes as long as one of
      a token each, so that tokens are drafted; `undrafted` says why none are.
    - `lacks` says why torch computes what a family of the device's kernels (`Lacks`) should;
      `notes` what else a person should know.
    """

    dtype: str
    quant: str
    kv: str
    attention: str
    compute: str
    deterministic: bool
    kv_block: int
    kv_blocks: tuple[int, ...]
    kv_sequences: int
    kv_tokens: int
    parked_blocks: tuple[int, ...]
    tokens_per_pass: int
    max_sequences: int
    placement: Placement
    budget: MemoryBudget
    process_nbytes: int
    resident_nbytes: int
    weights_nbytes: int
    held_nbytes: int
    kv_nbytes: int
    workspace_nbytes: int
    activations_nbytes: int
    slack_nbytes: int
    states_nbytes: int = 0
    prompt_cut: int = 1
    tables_nbytes: int = 0
    token_rows_nbytes: int = 0
    encoder_nbytes: int = 0
    kept_nbytes: int = 0
    fused_nbytes: int = 0
    graphs_nbytes: int = 0
    free_nbytes: int = 0
    grouped_products: bool = False
    stores_by_kernel: bool = False
    draws_by_kernel: bool = False
    free_tokens: tuple[int, ...] = ()
    undrafted: str = ""
    lacks: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    staging: HostStaging | None = None
    host_kv: CohortSizes | None = None
    cpu_experts: ExpertSeconds | None = None
    cpu_experts_nbytes: int = 0

    def without_cpu_attention(self) -> Self:
        """The plan in which all cohorts cross the link."""
        if self.host_kv is None:
            return self
        free = self.free_nbytes + 2 * self.host_kv.rows_nbytes
        return replace(self, host_kv=replace(self.host_kv, rows_nbytes=0), free_nbytes=free)

    @property
    def streams(self) -> bool:
        """Whether some weights stay on disk and are read in every pass."""
        if self.staging is not None:
            return self.staging.disk_nbytes > 0
        return self.placement.ring_nbytes > 0

    @property
    def scratch_nbytes(self) -> int:
        """Bytes that a pass computes with."""
        return self.workspace_nbytes + self.activations_nbytes + self.slack_nbytes

    @property
    def used_nbytes(self) -> int:
        """Bytes of the tier that computes."""
        # Needed before any pass: the process or the device's context, and small parameters.
        fixed = self.process_nbytes + self.resident_nbytes
        passes = self.scratch_nbytes + self.kept_nbytes + (0 if self.budget.device else self.encoder_nbytes)
        sequences = self.kv_nbytes + self.states_nbytes + (self.host_kv.device_nbytes if self.host_kv else 0)
        weights = self.held_nbytes + self.placement.ring_nbytes
        return fixed + passes + self.fused_nbytes + self.graphs_nbytes + sequences + weights

    def with_spare(self, nbytes: int) -> Plan:
        """The plan of a CPU with `nbytes` of its budget to spare: passes keep some of them, if there are enough."""
        kept = KEPT_NBYTES if nbytes >= KEPT_NBYTES else 0
        return replace(self, kept_nbytes=kept, free_nbytes=nbytes - kept)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Plan:
        """The inverse of `as_dict`. Raises ValueError, TypeError or KeyError for anything else."""
        plan: Plan = read_as(cls, content)
        return plan


def choose_placement(shards: ModelShards, free_nbytes: int, expert_ring: int = 0) -> Placement | None:
    """The placement that holds most in `free_nbytes` bytes; None where not even the smallest rings fit.

    A deep ring, or one `expert_ring` bytes larger than the smallest, comes before anything is held, as far as bytes are
    free.
    """
    if shards.nbytes <= free_nbytes:
        return everything(shards)
    smallest = minimum(shards)
    if smallest.nbytes(shards) > free_nbytes:
        return None
    deep = (DEEP_RING_EXPERTS - MIN_RING_EXPERTS) * largest_expert(shards)
    ahead = min(max(deep, expert_ring), free_nbytes - smallest.nbytes(shards))
    smallest = replace(smallest, expert_ring=smallest.expert_ring + ahead)
    dense = _hold_dense(shards, smallest, free_nbytes)
    ring = _largest_ring(shards, dense, free_nbytes)
    return _hold_experts(shards, Placement(dense.held_dense, dense.held_experts, dense.dense_ring, ring), free_nbytes)


def device_ring(shards: ModelShards, free_nbytes: int) -> int:
    """Bytes, beyond the smallest ring, for experts on their way to a device.

    One layer of experts, so that the link is busy while attention computes and while the host waits for what a layer's
    router wants; at most an eighth of `free_nbytes`, because the rest serves sequences.
    """
    expert = largest_expert(shards)
    return max(0, min(shards.most_experts, free_nbytes // 8 // max(1, expert)) - MIN_RING_EXPERTS) * expert


def stage(shards: ModelShards, held: Placement, free_nbytes: int) -> Placement | None:
    """The staging of the shards that a device does not hold (`held`) in `free_nbytes` of host memory.

    `held` counts as kept too, because neither comes from disk. There are rings even where all is kept: what cannot be
    page-locked goes through them (docs/dev/internals.md). None where not even the rings fit.
    """
    rings = minimum(shards)
    dense_ring = rings.dense_ring if held.dense_ring else 0
    expert_ring = rings.expert_ring if held.expert_ring else 0
    whole = everything(shards)
    whole = Placement(whole.held_dense, whole.held_experts, dense_ring, expert_ring)
    free = free_nbytes + held.held_nbytes(shards)
    if whole.nbytes(shards) <= free:
        return whole
    smallest = Placement(held.held_dense, held.held_experts, dense_ring, expert_ring)
    if smallest.nbytes(shards) > free:
        return None
    dense = _hold_dense(shards, smallest, free, keep_ring=True)
    ring = _largest_ring(shards, dense, free) if expert_ring else 0
    return _hold_experts(shards, Placement(dense.held_dense, dense.held_experts, dense_ring, ring), free)


def everything(shards: ModelShards) -> Placement:
    """A placement that holds all shards."""
    return Placement(len(shards.layers), tuple(layer.num_experts for layer in shards.layers), 0, 0)


def minimum(shards: ModelShards) -> Placement:
    """The least that a pass can do with: the head and shared blocks are held, and the rings are the smallest."""
    dense_ring = RING_LAYERS * max((layer.dense.nbytes for layer in shards.layers[shards.held :]), default=0)
    return Placement(shards.held, (0,) * len(shards.layers), dense_ring, MIN_RING_EXPERTS * largest_expert(shards))


def _hold_dense(shards: ModelShards, smallest: Placement, free_nbytes: int, keep_ring: bool = False) -> Placement:
    """Holds dense shards before any expert, because every token needs them; holding all of them saves their ring."""
    ring = smallest.dense_ring if keep_ring else 0
    all_dense = Placement(len(shards.layers), smallest.held_experts, ring, smallest.expert_ring)
    if all_dense.nbytes(shards) <= free_nbytes:
        return all_dense
    free, held = free_nbytes - smallest.nbytes(shards), smallest.held_dense
    for index in shards.dense_order[held:]:
        free -= shards.layers[index].dense.nbytes
        if free < 0:
            break
        held += 1
    return Placement(held, smallest.held_experts, smallest.dense_ring, smallest.expert_ring)


def _largest_ring(shards: ModelShards, placement: Placement, free_nbytes: int) -> int:
    expert = largest_expert(shards)
    free = free_nbytes - placement.nbytes(shards)
    missing = max(0, RING_EXPERTS * expert - placement.expert_ring)
    return placement.expert_ring + min(missing, free // max(expert, 1) * expert)


def _hold_experts(shards: ModelShards, placement: Placement, free_nbytes: int) -> Placement:
    """Holds the same number of experts in every layer, and one more in the first layers while bytes are free."""
    free, held = free_nbytes - placement.nbytes(shards), list(placement.held_experts)
    missing = [layer.num_experts - count for layer, count in zip(shards.layers, held, strict=True) if layer.expert]
    each = sum(layer.expert.nbytes for layer in shards.layers if layer.expert)
    if each and (rounds := min(*missing, max(0, free) // each)):
        held = [count + rounds if layer.expert else count for layer, count in zip(shards.layers, held, strict=True)]
        free -= rounds * each
    progress = True
    while progress:
        progress = False
        for index, layer in enumerate(shards.layers):
            if layer.expert and held[index] < layer.num_experts and layer.expert.nbytes <= free:
                held[index] += 1
                free -= layer.expert.nbytes
                progress = True
    return Placement(placement.held_dense, tuple(held), placement.dense_ring, placement.expert_ring)


def largest_expert(shards: ModelShards) -> int:
    """Bytes of the largest expert; 0 where there are none."""
    return max(shards.expert_nbytes, default=0)


def on_device_nbytes(shape: ModelShape, shards: ModelShards, dtype: str) -> int:
    """Bytes that are always on a device: norms, routers, biases; the embedding only where it is the head too."""
    embedding = shape.embedding_numel * ITEM_NBYTES[dtype]
    return resident_nbytes(shape, dtype) - (embedding if shards.head else 0)


def beside_device_nbytes(shape: ModelShape, dtype: str, device: DeviceBudget, encoder_nbytes: int) -> int:
    """Bytes of host memory beside a device that hold neither weights nor keys and values."""
    # Prompts are tokenized once loading is over.
    return device.process_nbytes + resident_nbytes(shape, dtype) + max(LOADING_NBYTES, encoder_nbytes)


def stage_for_device(shape: ModelShape, shards: ModelShards, plan: Plan) -> HostStaging:
    """The staging for the device of `plan`. Raises DoesNotFit, naming the smallest budget that works."""
    budget, held = plan.budget, plan.placement
    assert budget.device is not None
    fixed = beside_device_nbytes(shape, plan.dtype, budget.device, plan.encoder_nbytes)
    fixed += plan.host_kv.host_nbytes if plan.host_kv else 0
    kept = stage(shards, held, budget.host_nbytes - fixed)
    if kept is None:
        rings = minimum(shards)
        smallest = fixed + (rings.dense_ring if held.dense_ring else 0) + (rings.expert_ring if held.expert_ring else 0)
        raise DoesNotFit(
            f"{budget.host_nbytes / GIB:.2f} GiB of host memory is too little to stream this model to the device: "
            f"the smallest that works is --ram {-(-smallest // MIB)}MiB"
        )
    staged = kept.held_nbytes(shards) - held.held_nbytes(shards)
    disk = everything(shards).held_nbytes(shards) - kept.held_nbytes(shards)
    free = budget.host_nbytes - fixed - staged - kept.ring_nbytes
    return HostStaging(kept, staged, disk, free)
