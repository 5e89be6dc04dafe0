"""How the last runs compare with what was predicted of them. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from ...offload.budget import gib
from ..plan.history import RunRecord
from .finding import Finding, ok, warn

# Beyond this the plan of the next job may be far from the best.
_FAR_OFF = 0.5


def prediction_findings(runs: Sequence[RunRecord]) -> list[Finding]:
    """`runs` newest first; nothing where none was kept."""
    if not runs:
        return []
    newest = runs[0]
    errors = [run.predicted_tok_s / run.measured_tok_s - 1 for run in runs if run.measured_tok_s]
    says = (
        f"of the last {len(runs)} runs: off by {', '.join(f'{error:+.0%}' for error in errors)}; "
        f"the newest, {newest.model}: {newest.measured_tok_s:,.1f} tok/s, {newest.predicted_tok_s:,.1f} predicted, "
        f"peak {gib(newest.measured_peak_nbytes)} of {gib(newest.predicted_peak_nbytes)} planned"
    )
    if errors and abs(errors[0]) > _FAR_OFF:
        return [
            warn(
                "predictions", says, "moedge doctor, on an idle machine; the next run of its kind learns from this one"
            )
        ]
    return [ok("predictions", says)]
