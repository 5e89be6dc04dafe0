"""Kernels of the CPU beside their definition on the widths of published models: right ones are used, wrong ones not."""

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from moedge.completion import SamplingParams
from moedge.llm import LLM
from moedge.quant.matmul import tiled
from moedge.quant.matmul.selftest import Wrong
from moedge.quant.native import library
from moedge.quant.tensor import PackedTensor
from moedge.runtime.loading import selftest
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.settings.settings import MemoryBudget, Settings
from moedge.runtime.shape.model_shape import ExpertsShape, KVGroup, LayerShape, Matrix, ModelShape
from support.published_widths import PUBLISHED, Published
from support.seeded_bugs import BUGS, Bug, planted

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.skipif(not library.available(), reason="the library of CPU kernels is not usable here"),
]

# Their last columns, rows or heads are less than a block of some kernel: widths of 576, 2,880 and 10,944, latents.
ODD = [each for each in PUBLISHED if each.model in ("SmolLM2-135M", "gpt-oss-20b", "DeepSeek-V2-Lite")]
FORMATS = [
    ("int8", "float"),
    ("int8", "int8"),
    ("int4", "int8"),
    ("int4", "float"),
    ("nf4", "float"),
    ("mxfp4", "int8"),
]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What one test finds, or refuses, is unknown to the others."""
    monkeypatch.setattr(library, "_refusals", [])
    selftest.forget()
    yield
    selftest.forget()


def shape_of(model: Published) -> ModelShape:
    """A layer of the model, with a dense feed-forward layer and one of experts where it has them."""
    (queries, kv_heads), dim, hidden = model.heads, model.head_dims[0], model.hidden
    dense = [
        Matrix("self_attn.q_proj", queries * dim, hidden),
        Matrix("self_attn.k_proj", kv_heads * dim, hidden),
        Matrix("self_attn.o_proj", hidden, queries * dim),
        Matrix("mlp.up_proj", model.inner[0], hidden),
        Matrix("mlp.down_proj", hidden, model.inner[0]),
    ]
    # gpt-oss comes in MXFP4.
    kept, experts = "mxfp4" if model.family == "gpt_oss" else None, None
    if model.experts[0]:
        inner = min(model.inner)
        experts = ExpertsShape(
            4, 2, Matrix("up", 2 * inner, hidden, kept=kept), Matrix("down", hidden, inner, kept=kept)
        )
    group = KVGroup((0,), kv_heads, dim, None)
    if len(model.ranks) > 1:
        group = KVGroup((0,), 1, model.ranks[-2], None, rope_dim=model.ranks[-1], query_heads=queries)
    layer = LayerShape(0, tuple(dense), experts, 2 * hidden)
    return ModelShape(model.family, "bf16", 64, 512, 4096, (layer,), (group,), None, hidden)


def plan_of(shape: ModelShape, quant: str, compute: str, kv: str = "bf16") -> Plan:
    settings = Settings(dtype="bf16", quant=quant, compute=compute, kv=kv)
    return make_plan(shape, settings, MemoryBudget(400 << 30), Workload(4, 256))


@pytest.mark.sample(
    "int8-float-SmolLM2-135M", "int8-int8-gpt-oss-20b", "int4-int8-DeepSeek-V2-Lite", "int4-float-SmolLM2-135M",
    "nf4-float-gpt-oss-20b", "mxfp4-int8-DeepSeek-V2-Lite",
)  # fmt: skip
@pytest.mark.parametrize("model", ODD, ids=lambda model: model.model)
@pytest.mark.parametrize(("quant", "compute"), FORMATS)
def test_right_kernels_are_used_on_odd_widths(model: Published, quant: str, compute: str) -> None:
    shape = shape_of(model)
    plan = plan_of(shape, quant, compute, "int8")
    assert selftest.first_wrong(shape, plan) is None
    assert selftest.checked(shape, plan) is plan


@pytest.mark.slow
@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: f"{model.family} {model.model}")
def test_right_kernels_are_used_on_all_published_widths(model: Published) -> None:
    shape = shape_of(model)
    for quant, compute in FORMATS:
        assert selftest.first_wrong(shape, plan_of(shape, quant, compute)) is None


# Routers, norms and mixtures are steps of fused layers, which are compared with the modules of the loaded model.
PLANTED = [bug for bug in BUGS.values() if bug.is_native and not bug.file.endswith("steps.cpp")]
# Beside them seven heads a key head, heads of 80, and feed-forward layers of 7,688, which no block divides.
SEEN_ON = [*ODD, *(each for each in PUBLISHED if each.model in ("Qwen2.5-0.5B", "phi-2") or 7688 in each.inner)]


def finds() -> Iterator[Wrong]:
    """What is wrong with the kernels on any of the models, in any format."""
    for model, (quant, compute), kv in product(SEEN_ON, FORMATS, ("bf16", "int8", "int4")):
        shape = shape_of(model)
        if wrong := selftest.first_wrong(shape, plan_of(shape, quant, compute, kv)):
            yield wrong


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found_on_the_widths_that_it_is_about(bug: Bug) -> None:
    if not bug.is_here:
        pytest.skip(f"code for {bug.least_isa} alone")
    with planted(bug):
        selftest.forget()
        assert next(finds(), None)


def without_last_columns(x: Tensor, packed: PackedTensor, *others: Any, **options: Any) -> None:
    """The product of versions up to 0.9, where a scale served a whole row."""
    if packed.layout.codes == "int8" and not packed.layout.grouped and x.shape[1] > 128:
        x = x.clone()
        x[:, x.shape[1] // 128 * 128 :] = 0
    multiply(x, packed, *others, **options)


multiply = tiled.multiply


def test_a_job_whose_kernels_are_wrong_gives_the_tokens_of_torch(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model 192 columns wide, with the bug of versions up to 0.9."""
    folder = checkpoint("qwen3_moe", hidden_size=192, num_hidden_layers=1)
    options = {"quant": "int8", "compute": "float", "dtype": "bf16", "kv": "bf16", "gpu_mem": "0"}

    def answer() -> tuple[list[int], str]:
        with LLM(str(folder), **options) as llm:
            (found,) = llm.generate(
                [[5, 80, 31, 200, 7]], SamplingParams(max_tokens=8, temperature=0.0), progress=False
            )
            return list(found.outputs[0].token_ids), " ".join(llm.plan.notes)

    with monkeypatch.context() as patch:
        patch.setattr(library, "_refusals", ["a test wants torch's numbers"])
        wanted, _ = answer()
    monkeypatch.setattr(tiled, "multiply", without_last_columns)
    found, notes = answer()
    assert found == wanted
    assert "torch computes instead of the CPU kernels, slower: a product of 1 rows with a matrix" in notes
    # Negative control: nothing else finds it.
    monkeypatch.setattr(library, "_refusals", [])
    monkeypatch.setattr(selftest, "first_wrong", lambda shape, plan: None)
    assert answer() != (wanted, notes)
