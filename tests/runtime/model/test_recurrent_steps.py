"""One token each of many sequences, in layers that keep states (`runtime/model/recurrent/`): every way of sharing the
work gives the definition.
"""

from typing import Any

import pytest
import torch
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as mamba2_module
from transformers.models.qwen3_next import modeling_qwen3_next as delta_module

from moedge.runtime.engine.sequence import Batch, Sequence, pack
from moedge.runtime.kv.spec import StateSpec
from moedge.runtime.kv.states import StatePool
from moedge.runtime.model.recurrent import pass_states
from moedge.runtime.model.recurrent.pass_states import PassStates
from moedge.runtime.model.recurrent.seam import chunk_scan, gated_delta_rule
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.shape.model_shape import StateGroup

LAYER, PAST, CPU = 3, 5, torch.device("cpu")
# Runs of slots of several lengths, not in the order of the pass.
SLOTS = (6, 7, 8, 9, 0, 1, 4, 11, 12)
# How many bytes of states threads share, and how many a CPU gathers: everything by calls of few, or in one call.
WAYS = {"threads, in place": (0, 0), "threads, gathered": (0, 1 << 40), "one call": (1 << 40, 1 << 40)}


def a_pass() -> Batch:
    """A generated token of one sequence for every slot."""
    chosen = []
    for slot in SLOTS:
        sequence = Sequence([0] * PAST, SequenceSampling(4), output_ids=[1])
        sequence.table.state, sequence.table.num_tokens = slot, PAST
        chosen.append((sequence, 1))
    return pack(chosen)


def states_of(shape: tuple[int, ...], way: str, monkeypatch: pytest.MonkeyPatch, *, tiled: bool = False) -> PassStates:
    """With random states of every slot, in a pass that has begun; two threads share what is shared."""
    shared, gathered = WAYS[way]
    monkeypatch.setattr(pass_states, "SHARED_STEP_NBYTES", shared)
    monkeypatch.setattr(pass_states, "GATHERED_NBYTES", gathered)
    monkeypatch.setattr(pass_states, "num_workers", lambda: 2)
    states = PassStates()
    states.tiled = tiled
    states.pool = StatePool(StateSpec((StateGroup((LAYER,), (), shape),), "fp32"), 14)
    states.pool.recurrent(LAYER).codes.normal_(generator=torch.Generator().manual_seed(3))
    states.begin(a_pass(), CPU)
    return states


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def delta(states: PassStates) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs and states of gated delta nets after the pass, and those of transformers' recurrent code."""
    count, known = len(SLOTS), vars(delta_module)
    q, k, v = random(1, count, 2, 16, seed=1), random(1, count, 2, 16, seed=2), random(1, count, 4, 24, seed=4)
    g, beta = -random(1, count, 4, seed=5).abs(), random(1, count, 4, seed=6).sigmoid()
    kept = states.pool.recurrent(LAYER)
    wanted, after = known["torch_recurrent_gated_delta_rule"](
        *(each.transpose(0, 1).repeat_interleave(4 // each.shape[2], 2) for each in (q, k, v)),
        g=g.transpose(0, 1), beta=beta.transpose(0, 1), initial_state=kept.codes[list(SLOTS)].clone(),
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    out, _ = gated_delta_rule(states, LAYER, known)(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
    return out, kept.codes[list(SLOTS)], wanted.transpose(0, 1), after


def mamba2(states: PassStates) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same of Mamba-2."""
    count, known = len(SLOTS), vars(mamba2_module)
    x, dt, b, c = random(1, count, 4, 8, seed=1), random(1, count, 4, seed=2), *random(2, 1, count, 2, 16, seed=4)
    a, d, bias = -random(4, seed=5).abs(), random(4, seed=6), random(4, seed=7)
    kept = states.pool.recurrent(LAYER)
    after = kept.codes[list(SLOTS)].clone()
    heads = {"D": d.view(4, 1).expand(4, 8), "dt_bias": bias.view(4, 1).expand(4, 8)}
    wanted = known["mamba2_selective_state_update"](
        after, x[0], dt[0].unsqueeze(-1).expand(-1, 4, 8), a.view(4, 1, 1).expand(4, 8, 16), b[0], c[0], z=None,
        dt_softplus=True, **heads,
    )  # fmt: skip
    infinite = {"dt_softplus": True, "dt_limit": (0.0, float("inf"))}
    out = chunk_scan(states, LAYER, known)(x, dt, a, b, c, D=d, dt_bias=bias, **infinite)
    return out, kept.codes[list(SLOTS)], wanted.unsqueeze(0), after


CASES: dict[str, tuple[Any, tuple[int, ...]]] = {"gated delta": (delta, (4, 16, 24)), "Mamba-2": (mamba2, (4, 8, 16))}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_what_transformers_computes(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, shape = CASES[kind]
    states = states_of(shape, way, monkeypatch)
    out, kept, wanted, after = compute(states)
    assert torch.allclose(out, wanted, atol=1e-5)
    assert torch.allclose(kept, after, atol=1e-5)
    # Four runs of slots, of which calls of at most five sequences compute all.
    calls = {"threads, in place": 4, "threads, gathered": 2, "one call": 1}[way]
    assert (states.num_steps, states.num_stepped) == (calls, len(SLOTS))
    assert (states._workers is not None) == way.startswith("threads")


@pytest.mark.parametrize("kind", CASES)
def test_bits_do_not_depend_on_threads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, shape = CASES[kind]
    found = []
    for way in ("threads, in place", "one call"):
        states = states_of(shape, way, monkeypatch, tiled=True)
        found.append(compute(states)[:2])
        assert states.num_steps == len(SLOTS)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_states_of_other_sequences_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    states = states_of((4, 16, 24), "threads, in place", monkeypatch)
    before = states.pool.recurrent(LAYER).codes.clone()
    delta(states)
    changed = (states.pool.recurrent(LAYER).codes != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == sorted(SLOTS)
