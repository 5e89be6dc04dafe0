"""What products are computed with, for a model and a plan: scratch, threads, and kernels that suit this machine."""

from __future__ import annotations

import torch

from ..offload.machine.threads import crew_size
from ..quant.few_rows import measure_few_rows
from ..quant.linear import Compute
from ..quant.workspace import Workspace
from .plan.planner import Plan
from .shape.layouts import helper_nbytes, workspace_nbytes
from .shape.model_shape import ModelShape


def make_compute(shape: ModelShape, plan: Plan, place: torch.device) -> Compute:
    sizes = (shape, plan.quant, plan.dtype, plan.deterministic)
    # Experts are computed side by side; a dense model's products have all threads each. A device is one queue of work,
    # which further threads would not fill any faster.
    experts = place.type == "cpu" and any(layer.experts for layer in shape.layers)
    helpers = crew_size() - 1 if experts else 0
    return Compute(
        Workspace(workspace_nbytes(*sizes), place),
        deterministic=plan.deterministic,
        integer=plan.compute == "int8",
        few_rows=measure_few_rows(plan.quant),
        helpers=[Workspace(helper_nbytes(*sizes)) for _ in range(min(helpers, torch.get_num_threads() - 1))],
    )
