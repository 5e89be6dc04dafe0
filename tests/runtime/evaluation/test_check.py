"""What `moedge check` finds: nothing in checkpoints that are computed right, and the layer where an engine is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moedge.cli.views.bench_view import verdict
from moedge.quant.native import library
from moedge.runtime.attention.native_rows import RowAttention, RowPlan, RowQuery
from moedge.runtime.evaluation import reference
from moedge.runtime.evaluation.check import PROMPTS, CheckReport, check
from moedge.runtime.loading.prepare import prepare
from moedge.runtime.settings.errors import DoesNotFit, SettingError
from moedge.runtime.settings.settings import Budgets
from moedge.runtime.source.model_source import ModelSource, open_source
from support.gguf_files import build, save_tokenizer, to_gguf
from support.installed_transformers import installed
from support.quantized_checkpoints import write_quantized
from support.seeded_bugs import BUGS, planted

pytestmark = pytest.mark.numerics

needs_library = pytest.mark.skipif(not library.available(), reason=f"no library of CPU kernels: {library.lack()}")
BUDGETS = Budgets(ram="6GiB", gpu_mem="0")
FEW = PROMPTS[:1]
BUNDLED = Path(__file__).parents[3] / "examples" / "tiny_moe" / "model"
IDS = torch.tensor([[5, 80, 31, 200, 7, 9], [7, 7, 300, 4, 0, 0]])
ROWS = torch.tensor([2, 3, 5])


@pytest.fixture
def model(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3_moe")


def compare(model: Path, **options: object) -> CheckReport:
    return check(model, **{"budgets": BUDGETS, "dtype": "fp32", **options})  # type: ignore[arg-type]


def test_a_checkpoint_is_computed_as_transformers_computes_it(model: Path) -> None:
    found = compare(model)
    assert found.within
    assert (found.reference, found.why, found.parts_at) == ("transformers", "", None)
    assert (found.prompts, found.greedy_same, found.greedy_total) == (len(PROMPTS), 32, 32)
    assert 0 < found.max_relative < 1e-4
    assert len(found.layers) == 4
    document = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert document["within"]
    assert document["bound"] == {"local": [1e-4] * 4, "head": 1e-4, "rerouted": 0.5}


def test_rounding_is_no_difference(model: Path) -> None:
    """In bf16 this model is far from its own float32 end to end: routers choose other experts, and nothing is alike."""
    found = check(model, dtype="bf16", budgets=BUDGETS)
    assert found.kl > 0.1
    assert found.within
    assert found.parts_at is None
    assert 0 < max(found.rerouted) < 0.1
    assert "Same: " in verdict(found)


def test_the_bundled_model_is_the_same_in_its_own_dtype() -> None:
    found = check(BUNDLED, FEW, budgets=BUDGETS)
    assert found.dtype == "bf16"
    assert found.within
    assert found.head < 2**-7


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_one_altered_expert_is_found_in_its_layer(model: Path, dtype: str, tmp_path: Path) -> None:
    """Prepared weights of a copy in which one expert has other bytes, against the checkpoint."""
    other = altered(model, tmp_path / "altered", "layers.2.mlp.experts.3.")
    found = check(prepared(other, tmp_path / "store", dtype), FEW, against=model, budgets=BUDGETS)
    assert not found.within
    assert found.parts_at == 2
    assert found.local[2] > 4 * found.bounds[2]
    assert all(found.local[at] <= found.bounds[at] for at in (0, 1, 3))
    assert "layer 2 is the first to part" in verdict(found)
    sound = check(prepared(model, tmp_path / "sound", dtype), FEW, against=model, budgets=BUDGETS)
    assert sound.within
    assert sound.parts_at is None


@pytest.mark.parametrize(
    ("part", "factor", "layer", "said"),
    [
        # As `test_one_altered_expert_is_found_in_its_layer` does with a smaller model.
        pytest.param("layers.4.mlp.experts.11.down_proj", 1.5, 4, "its output differs by", marks=pytest.mark.slow),
        ("layers.1.mlp.gate.", -1.0, 1, "its router chooses other experts for"),
        pytest.param("layers.0.input_layernorm.", 1.1, 0, "its output differs by", marks=pytest.mark.slow),
        ("model.norm.", 1.1, None, "all layers agree"),
    ],
)
def test_what_is_wrong_in_the_bundled_model_is_named_in_bf16(
    part: str, factor: float, layer: int | None, said: str, tmp_path: Path
) -> None:
    store = prepared(altered(BUNDLED, tmp_path / "altered", part, factor), tmp_path / "store", "bf16")
    # The first prompt wants few experts.
    found = check(store, PROMPTS if "experts" in part else FEW, against=BUNDLED, budgets=BUDGETS)
    assert not found.within
    assert found.parts_at == layer
    assert said in verdict(found)


def test_prompts_that_begin_alike_are_compared_whole(model: Path) -> None:
    """The second one's beginning is computed once, for the first one."""
    shared = "The harbour was quiet when the last ferry came in, and the gulls had gone. " * 2
    alone = check(model, [shared + "One"], dtype="bf16", budgets=BUDGETS)
    found = check(model, [shared + "One", shared + "Two"], dtype="bf16", budgets=BUDGETS)
    assert found.tokens < 1.5 * alone.tokens
    assert found.within


@needs_library
def test_wrong_attention_of_the_kernels_that_jobs_use_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = RowAttention.attend

    def wrong(self: RowAttention, query: RowQuery, keys: Any, values: Any, plan: RowPlan, out: torch.Tensor) -> None:
        attend(self, query, keys, values, plan, out)
        out.mul_(1.01)

    monkeypatch.setattr(RowAttention, "attend", wrong)
    found = compare(model)
    assert not found.within
    assert found.parts_at == 0


# 192 is no multiple of the 128 columns that a scale of a row was once thought to be read by; layers are fused.
WIDE = {"hidden_size": 192, "moe_intermediate_size": 96, "num_attention_heads": 6}
JOBS = [
    ("none", "float", "bf16"),
    ("int8", "float", "int8"),
    ("int8", "int8", "int8/int4"),
    ("int4", "int8", "int4"),
    ("nf4", "float", "bf16"),
    ("mxfp4", "float", "int8"),
    ("none+int3", "float", "bf16"),
    ("int8+int3", "int8", "int8"),
]


@needs_library
@pytest.mark.sample("int4-int8-int4")
@pytest.mark.parametrize(("quant", "compute", "kv"), JOBS)
def test_every_format_is_within_its_own_bounds(
    quant: str, compute: str, kv: str, checkpoint: Callable[..., Path]
) -> None:
    model = checkpoint("qwen3_moe", **WIDE)
    found = check(model, FEW, quant=quant, compute=compute, kv=kv, dtype="bf16", budgets=BUDGETS)
    assert found.difference == ""
    assert (found.quant, found.compute, found.kv) == (quant, compute, kv)
    parts = {part.name for part in found.parts if part.layer == 0}
    assert parts == {f"self_attn.{each}_proj" for each in "qkvo"} | {"attention", "mlp.experts"}
    assert any(part.layer is None for part in found.parts)


# No block of some kernel divides these: heads of 22, experts of 104 and of 160, 7 experts, 3,000 rows of a head.
NARROW = {"hidden_size": 160, "moe_intermediate_size": 104, "num_attention_heads": 7, "num_key_value_heads": 1}
Q, HEAD = "layer 0, self_attn.q_proj", "the output head"
# By a bug's name: a model and a job in which it occurs, whether that is deterministic, and what is said first.
PLANTED: dict[str, tuple[dict[str, int], tuple[str, str, str], bool, str]] = {
    "columns of a row's scale": (WIDE, ("int8", "float", "bf16"), False, Q),
    # Of experts, where a processor has another way for so many rows of a dense matrix.
    "columns that many rows share": (WIDE, ("nf4", "float", "bf16"), False, "layer 0, "),
    "columns of integers": (WIDE, ("int4", "int8", "bf16"), False, Q),
    "groups of a tile": (WIDE, ("int8", "float", "bf16"), False, Q),
    "tiles of a matrix": (WIDE, ("int8", "float", "bf16"), False, HEAD),
    "chunks of an expert's inner numbers": (WIDE, ("int8", "float", "bf16"), False, "layer 0, mlp.experts"),
    "experts of a router": (WIDE | {"num_experts": 7}, ("int8", "float", "bf16"), False, "layer 0 "),
    "columns of a gate": (WIDE | {"intermediate_size": 704}, ("int8", "float", "bf16"), False, "layer 0"),
    "elements of a norm": (WIDE, ("int8", "float", "bf16"), False, "layer 0"),
    "keys of a split": (WIDE, ("none", "float", "bf16"), False, "layer 0, attention"),
    "last columns of int8 rows": (NARROW, ("int8", "float", "bf16"), False, "layer 0 "),
    "chunks of a widened tile": (WIDE, ("int4", "float", "bf16"), False, "layer 0, attention"),
    "columns of words": (WIDE, ("int8", "float", "bf16"), False, Q),
    "signs of sums of words": (WIDE, ("int4", "float", "bf16"), False, Q),
    "rows of floats": (WIDE, ("none", "float", "bf16"), False, Q),
    "rows of a deterministic product": (NARROW, ("none", "float", "bf16"), True, "layer 0, self_attn"),
    "strips of a matrix": (WIDE | {"vocab_size": 3000}, ("int8", "float", "bf16"), True, HEAD),
    "vectors that are rotated": (WIDE, ("none", "float", "int4"), True, "layer 0, attention"),
}
# Kernels for AVX-512 alone, for MOEDGE_ISA=none, and for a GPU; and what a pass of fewer than 129 tokens never does,
# which loading compares (tests/runtime/model/test_fused.py), as it does what packs.
ELSEWHERE = {
    "rows beyond two blocks", "heads of a group", "elements of a query", "groups of MXFP4", "rows of an expert",
    "columns of a Triton product", "rows of a Triton product", "keys of a Triton split", "elements of a Triton head",
    "halves of Triton's int4 keys", "zero points of Triton's int4 values", "upper bits of three-bit codes",
    "last columns of a row's widest group", "groups of Triton's int3 codes", "sign of Triton's int3 scales",
    "pairs that share a byte of Triton's int3 codes", "groups of Triton's vq2 codes",
    "pairs that share a byte of Triton's vq2 signs",
}  # fmt: skip


def test_every_planted_bug_has_a_check_or_a_reason() -> None:
    assert set(BUGS) == set(PLANTED) | ELSEWHERE


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_named_with_its_layer_and_module(bug: str, checkpoint: Callable[..., Path]) -> None:
    if not BUGS[bug].is_here:
        pytest.skip(f"code for {BUGS[bug].most_isa} alone")
    changes, (quant, compute, kv), deterministic, part = PLANTED[bug]
    family = "llama" if "intermediate_size" in changes else "qwen3_moe"
    folder, options = checkpoint(family, **changes), {"quant": quant, "compute": compute, "kv": kv}
    with planted(BUGS[bug]):
        found = check(folder, **options, dtype="bf16", deterministic=deterministic, budgets=BUDGETS)  # type: ignore[arg-type]
    assert not found.within
    assert found.difference.startswith(part)


def altered(model: Path, folder: Path, part: str, factor: float = 1.5) -> Path:
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    chosen = [name for name in tensors if part in name]
    assert chosen
    for name in chosen:
        tensors[name] = tensors[name] * factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def prepared(model: Path, store: Path, dtype: str = "fp32") -> Path:
    with open_source(str(model)) as source:
        prepare(source, store, "none", dtype, Budgets().on_cpu())
    return store


# Of every way in which transformers' code has experts, biases, recurrent layers, latents and shared blocks.
WAYS = "gpt_oss longcat_flash llama4_text qwen3_next deepseek_v3 jamba granitemoe gemma3_text zamba2"


@pytest.mark.sample("gpt_oss", "longcat_flash", "llama4_text")
@pytest.mark.parametrize("family", [*WAYS.split(), *installed(["qwen4_exp_text"])])
def test_a_layer_at_a_time_gives_what_the_whole_model_gives(
    family: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With three experts in memory at a time, too."""
    with open_source(str(checkpoint(family))) as source:
        whole = reference._by_transformers(source, IDS, ROWS)
        for count in (1000, 3):
            monkeypatch.setattr(reference, "experts_at_once", lambda *_, count=count: count)
            found = reference._by_layers(source, IDS, ROWS, 1 << 33)
            assert (found.logits - whole.logits).abs().max() <= 1e-5 * whole.logits.abs().max()
            assert (found.hidden - whole.hidden).abs().max() <= 1e-5 * whole.hidden.abs().max()


def test_what_does_not_fit_the_budget_is_computed_by_layers_or_refused(model: Path) -> None:
    with open_source(str(model)) as source:
        smallest = next(mib for mib in range(500, 1000) if _fits(source, mib))
        assert "takes" in reference.compute_reference(source, IDS, ROWS, smallest << 20).why
        with pytest.raises(DoesNotFit, match=f"--ram {smallest}MiB"):
            reference.compute_reference(source, IDS, ROWS, (smallest - 1) << 20)


def _fits(source: ModelSource, mib: int) -> bool:
    try:
        return reference.experts_at_once(source.shape, mib << 20) > 0
    except DoesNotFit:
        return False


@pytest.mark.sample("mxfp4", "fp8 blocks")
@pytest.mark.parametrize("form", ["mxfp4", "fp8 blocks", "awq", "bnb nf4", "ct int4 g64 fp16 asym"])
def test_kept_codes_are_the_same_and_packed_ones_state_their_loss(form: str, tmp_path: Path) -> None:
    family = "gpt_oss" if form == "mxfp4" else "qwen3_moe"
    write_quantized(form, tmp_path / "quantized", tmp_path / "wide", family)
    found = compare(tmp_path / "quantized", prompts=FEW)
    assert found.within
    assert found.reference == ("transformers" if form == "mxfp4" else "layers")
    if form == "fp8 blocks":
        assert found.quant == "int8"
        assert 0 < found.loss["experts"] < 0.02
        exact = compare(tmp_path / "quantized", prompts=FEW, quant="none")
        assert exact.within
    else:
        assert found.greedy_same == found.greedy_total


@pytest.mark.slow
def test_a_gguf_file_is_computed_as_transformers_computes_it(tmp_path: Path) -> None:
    path = to_gguf(build("qwen3_moe"), tmp_path / "model.gguf", "Q8_0", save_tokenizer(tmp_path / "tokenizer", 384))
    found = compare(path)
    assert found.within


def test_what_cannot_be_compared_is_refused(model: Path, tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    store = prepared(model, tmp_path / "store")
    for options, match in (
        ({"model": store}, "--against CHECKPOINT"),
        ({"model": model, "against": str(model)}, "is for prepared weights"),
        ({"model": store, "against": str(store)}, "is prepared, too"),
        ({"model": store, "against": str(checkpoint("llama"))}, "made from another model"),
    ):
        with pytest.raises(SettingError, match=match):
            compare(**options)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="a prompt has 0 tokens"):
        check(model, [""], budgets=BUDGETS)
