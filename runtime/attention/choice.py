"""Which attention backend computes a run: the first of the table that can, or the one that is asked for. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ...quant.kv_format import KV_FORMATS
from ..errors import SettingError


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a run asks of attention. `device` is cpu or cuda, `capability` a CUDA device's, as (8, 6)."""

    head_dims: frozenset[int]
    kv_format: str
    device: str = "cpu"
    capability: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What a backend can do. All of them honour windows, softcap and sinks."""

    name: str
    devices: tuple[str, ...]
    least_capability: tuple[int, int] = (0, 0)
    largest_head: int = 1 << 16
    formats: tuple[str, ...] = KV_FORMATS

    def lacks(self, needs: AttentionNeeds) -> str:
        """The first thing that it cannot do, in words; "" where it can do all."""
        if needs.device not in self.devices:
            return f"it runs on {' and '.join(self.devices)}, and this run computes on {needs.device}"
        if needs.capability is not None and needs.capability < self.least_capability:
            least, found = _dotted(self.least_capability), _dotted(needs.capability)
            return f"it needs compute capability {least}, this GPU has {found}"
        if max(needs.head_dims) > self.largest_head:
            return f"it takes heads of at most {self.largest_head} elements, this model's have {max(needs.head_dims)}"
        if needs.kv_format not in self.formats:
            return f"it reads KV in {', '.join(self.formats)}, and {needs.kv_format} is asked for"
        return ""


# Best first: auto takes the first that can.
KINDS = (
    AttentionKind("triton", ("cuda",), least_capability=(7, 5), largest_head=256),
    AttentionKind("torch", ("cpu", "cuda")),
)


def choose_attention(wanted: str, needs: AttentionNeeds) -> str:
    """The name of a backend; `wanted` is one, or auto. Raises SettingError with what the wanted one cannot do."""
    kinds = [kind for kind in KINDS if wanted in ("auto", kind.name)]
    if not kinds:
        raise SettingError(f"--attention {wanted} is unknown; use auto, {', '.join(kind.name for kind in KINDS)}")
    for kind in kinds:
        if not (lack := kind.lacks(needs)):
            return kind.name
    raise SettingError(f"--attention {wanted} cannot compute this run: {lack}. Use --attention auto.")


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
