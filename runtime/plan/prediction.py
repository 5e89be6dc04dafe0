"""What a job is predicted to take, and the resources that its passes wait for. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

Resource = Literal["disk", "link", "compute", "host", "cpu"]
RESOURCES: tuple[Resource, ...] = ("disk", "link", "compute", "host", "cpu")


@dataclass(frozen=True, slots=True)
class Prediction:
    """The time of the whole job: `seconds` to generate after `loading_s`, in which `written_nbytes` go to disk.

    `busy_s` is by resource, while generating; passes wait for the `bottleneck`. Assumes that answers have `max_tokens`
    tokens and that prompts share no prefix. The CPU computes `cpu_experts` in a mean pass of a device.
    """

    seconds: float
    prompt_tok_s: float
    generated_tok_s: float
    passes: float
    sequences: float
    bottleneck: Resource
    busy_s: Mapping[str, float]
    disk_nbytes: float
    link_nbytes: float
    loading_s: float = 0.0
    written_nbytes: int = 0
    cpu_experts: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds from the start to the last answer."""
        return self.loading_s + self.seconds

    def corrected(self, factor: float, loading: float = 1.0) -> Self:
        """The same where generating takes `factor` times as long, and loading `loading` times."""
        return replace(
            self,
            seconds=self.seconds * factor,
            prompt_tok_s=self.prompt_tok_s / factor,
            generated_tok_s=self.generated_tok_s / factor,
            busy_s={name: busy * factor for name, busy in self.busy_s.items()},
            loading_s=self.loading_s * loading,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
