"""Which attention backend computes a run: the first of the table that can, or the one that is asked for. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ...quant.kernels.gpu import Gpu
from ..settings.errors import SettingError


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a run asks of attention. `gpu` is the device's, None on the processor.

    `interpreted`: Triton's kernels run on the processor, in its interpreter; only who asks for them gets them there.
    """

    head_dims: frozenset[int]
    gpu: Gpu | None = None
    interpreted: bool = False


# The most elements of a head that Triton's kernels are cut for.
LARGEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What a backend can do. All of them honour windows, chunks, softcap and sinks, and read every KV format."""

    name: str
    triton: bool = False
    largest_head: int = 1 << 16

    def lack(self, needs: AttentionNeeds) -> str:
        """The first thing that it cannot do, in words; "" where it can do all."""
        if self.triton and needs.gpu is None and not needs.interpreted:
            return "it runs on NVIDIA GPUs, and this run computes on the processor"
        if self.triton and needs.gpu is not None and needs.gpu.lacks.attention:
            return needs.gpu.lacks.attention
        if max(needs.head_dims) > self.largest_head:
            return f"it takes heads of at most {self.largest_head} elements, this model's have {max(needs.head_dims)}"
        return ""


# Best first: auto takes the first that can.
KINDS = (AttentionKind("triton", triton=True, largest_head=LARGEST_HEAD), AttentionKind("torch"))


def choose_attention(wanted: str, needs: AttentionNeeds) -> str:
    """The name of a backend; `wanted` is one, or auto. Raises SettingError with what the wanted one cannot do."""
    kinds = [kind for kind in KINDS if wanted in ("auto", kind.name)]
    if not kinds:
        raise SettingError(f"--attention {wanted} is unknown; use auto, {', '.join(kind.name for kind in KINDS)}")
    for kind in kinds:
        slow = wanted == "auto" and kind.triton and needs.gpu is None
        if not slow and not (lack := kind.lack(needs)):
            return kind.name
    raise SettingError(f"--attention {wanted} cannot compute this run: {lack}. Use --attention auto.")


def stores_by_kernel(wanted: str, taken: str, needs: AttentionNeeds) -> bool:
    """Whether Triton's kernel writes keys and values into the cache; `taken` is the backend that `wanted` became.

    It serves both backends. Who asks for torch's gets nothing of Triton's.
    """
    if wanted == "torch" or max(needs.head_dims) > LARGEST_HEAD:
        return False
    return taken == "triton" if needs.gpu is None else not needs.gpu.lacks.cache


# Elements of keys (and of values) that one thread multiplies in one call: enough that calls cost little beside it.
JOB_NUMEL = 1 << 20
# So little is computed before another thread has woken up.
LITTLE_NUMEL = 1 << 18
# Bytes of what blocks contribute to their sequences, before it is summed up.
PARTS_NBYTES = 32 << 20
# Blocks of fewer tokens are gathered and joined to pieces of about as many: products of fewer cost as much.
PIECE_TOKENS = 32
