"""Chooses the attention backend of a run: the first of a table that can compute it, or the one named. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ...quant.kernels.gpu import Gpu
from ..settings.errors import SettingError


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a run needs from attention. `gpu` describes the device; it is None on a CPU.

    `interpreted`: Triton's kernels run on the CPU, in Triton's interpreter; `auto` never chooses that. `latent`: layers
    cache latents. `indexed`: an indexer chooses the tokens that are attended to. `native_lack` says why the library of
    CPU kernels (quant/native) cannot be used, "" if it can.
    """

    head_dims: frozenset[int]
    gpu: Gpu | None = None
    interpreted: bool = False
    latent: bool = False
    indexed: bool = False
    native_lack: str = "nobody looked for the library of CPU kernels"


NO_LATENTS = "Triton's kernels do not compute latent attention"
NO_INDEX = "Triton's kernels do not attend to tokens that an indexer chooses"
# The largest head dimension that Triton's kernels support.
LARGEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What a backend can do. All backends honour windows, chunks, softcap and sinks, and read every KV format."""

    name: str
    triton: bool = False
    native: bool = False
    largest_head: int = 1 << 16

    def lack(self, needs: AttentionNeeds) -> str:
        """A sentence on the first need that the backend cannot meet; "" where it meets all."""
        if self.triton and needs.latent:
            return NO_LATENTS
        if self.triton and needs.indexed:
            return NO_INDEX
        if self.triton and needs.gpu is None and not needs.interpreted:
            return "it runs on NVIDIA GPUs, and this run computes on the CPU"
        if self.triton and needs.gpu is not None and needs.gpu.lacks.attention:
            return needs.gpu.lacks.attention
        if self.native and (needs.gpu is not None or needs.native_lack):
            return needs.native_lack or "it runs on the CPU, and this run computes on a GPU"
        if max(needs.head_dims) > self.largest_head:
            return (
                f"it supports heads of at most {self.largest_head} elements, this model's have {max(needs.head_dims)}"
            )
        return ""


# In order of preference: `auto` takes the first that can compute the run.
KINDS = (
    AttentionKind("triton", triton=True, largest_head=LARGEST_HEAD),
    AttentionKind("native", native=True),
    AttentionKind("torch"),
)


def choose_attention(wanted: str, needs: AttentionNeeds) -> str:
    """The name of the backend to use; `wanted` is a backend or "auto". Raises SettingError where it cannot be used."""
    kinds = [kind for kind in KINDS if wanted in ("auto", kind.name)]
    if not kinds:
        raise SettingError(f"attention {wanted} is unknown; use auto, {', '.join(kind.name for kind in KINDS)}")
    for kind in kinds:
        slow = wanted == "auto" and kind.triton and needs.gpu is None
        if not slow and not (lack := kind.lack(needs)):
            return kind.name
    raise SettingError(f"attention {wanted} cannot compute this run: {lack}. Use attention auto.")


def stores_by_kernel(wanted: str, taken: str, needs: AttentionNeeds) -> bool:
    """Whether Triton's kernel writes keys and values into the cache; `taken` is the backend chosen for `wanted`.

    The kernel serves both backends. `attention` "torch" uses nothing of Triton's.
    """
    if needs.latent or needs.indexed or wanted == "torch" or max(needs.head_dims) > LARGEST_HEAD:
        return False
    return taken == "triton" if needs.gpu is None else not needs.gpu.lacks.cache


# Query rows of one masked call of a prompt: its scores have at most ROWS * heads * length elements.
ROWS = 256
# Products of an indexer's queries and keys at a time (sparse attention).
SCORED_NUMEL = 4 << 20
# Elements of keys (and of values) of generated tokens that torch gathers at a time, a sequence at least.
GATHERED_NUMEL = 4 << 20
# Scores of a head of a chunk of a prompt up to which the CPU kernels of rows compute it: calls of torch for every chunk
# take longer than its products (bench/results/attention.md).
CHUNK_SCORES = 96 * 96
# One thread multiplies this many elements before a second one has woken up.
SINGLE_THREAD_NUMEL = 1 << 18
# Bytes of the partial results of a wave.
PARTIALS_NBYTES = 32 << 20
# Bytes of the keys and values that a prompt expands from latents at a time, copies included.
EXPANDED_NBYTES = 64 << 20
