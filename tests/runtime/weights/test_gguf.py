"""GGUF files load, stream at the smallest budget, and compute what gguf's own dequantizers make of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from moedge.offload.checkpoint.gguf_file import GgufCheckpoint
from moedge.offload.errors import BadCheckpoint
from moedge.offload.store.store import Store
from moedge.runtime.model.dequantize import dequantize
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.settings import errors
from moedge.runtime.settings.errors import ModelNotFound, OldTransformers, UnsupportedModel
from moedge.runtime.settings.settings import MemoryBudget
from moedge.runtime.shape.checkpoint_shape import read_config, read_shape, read_tensors
from moedge.runtime.shape.gguf import gguf_config
from moedge.runtime.source import hub
from moedge.runtime.source.hub import find_model
from moedge.runtime.source.model_source import describe, model_fingerprint, open_source, read_headers
from moedge.runtime.text import gguf_tokenizer
from moedge.runtime.text.tokenizer import Tokenizer
from support import gguf_files
from support.gguf_files import build, save_sentencepiece, save_tokenizer, to_gguf
from support.installed_transformers import needs_transformers
from support.streamed_logits import JOB, SETTINGS, stock_logits, streamed_logits

pytestmark = pytest.mark.numerics

# Float32 sums in another order.
TOLERANCE = 1e-5
builds_tokenizers = needs_transformers(gguf_tokenizer.SINCE)
# Rows of whole blocks of K and I formats.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}


def check_logits(
    family: str, kind: str, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **sizes: Any
) -> None:
    model = build(family, **sizes)
    path = to_gguf(model, tmp_path / "model.gguf", kind, save_tokenizer(tmp_path / "tokenizer", 384))
    wanted = stock_logits(model)
    found = streamed_logits(path, tmp_path / "store", replace(SETTINGS, quant=quant), monkeypatch)
    assert wanted.std() > 0.1
    assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


@builds_tokenizers
@pytest.mark.sample("llama")
@pytest.mark.parametrize("family", gguf_files.ARCHITECTURES)
def test_logits_of_a_family_are_those_of_the_dequantized_weights(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_logits(family, "Q8_0", "none", tmp_path, monkeypatch)


@builds_tokenizers
@pytest.mark.sample("Q6_K")
@pytest.mark.parametrize("kind", ["F16", "BF16", "F32", "Q5_0", "Q6_K", "IQ4_XS", "IQ2_XXS"])
def test_logits_of_a_type_are_those_of_the_dequantized_weights(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_logits("qwen3_moe", kind, "none", tmp_path, monkeypatch, **WIDE)


KEPT = {"Q8_0": "int8-g32-f16", "Q4_0": "int4-g32-f16", "Q4_K": "q4_k", "MXFP4": "mxfp4-e8m0"}


@builds_tokenizers
@pytest.mark.sample("Q4_K")
@pytest.mark.parametrize("kind", KEPT)
def test_kept_blocks_mean_what_they_meant(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {**WIDE, "num_hidden_layers": 4} if kind == "Q4_0" else WIDE
    check_logits("llama" if kind == "Q4_0" else "qwen3_moe", kind, "kept", tmp_path, monkeypatch, **sizes)
    with Store.open(tmp_path / "store") as store:
        assert store.manifest.recipe["quant"] == KEPT[kind]
        assert not store.manifest.extra["loss"]


@builds_tokenizers
def test_kept_blocks_of_heads_are_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_logits("llama", "Q4_K", "kept", tmp_path, monkeypatch, **{**WIDE, "num_hidden_layers": 4})


@builds_tokenizers
def test_codes_that_no_format_has_stay_nearly_as_precise_beside_kept_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in files that llama-quantize calls Q4_K_M: matrices in Q6_K and Q5_0 beside those in Q4_K."""
    model = build("llama", **{**WIDE, "num_hidden_layers": 4})
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "attn_k": "Q5_0", "ffn_up": "Q3_K"}
    path = to_gguf(model, tmp_path / "model.gguf", "Q4_K", save_tokenizer(tmp_path / "tokenizer", 384), kinds=kinds)
    wanted = stock_logits(model)
    found = streamed_logits(path, tmp_path / "store", replace(SETTINGS, quant="kept"), monkeypatch)
    assert wanted.std() > 0.1
    assert (found - wanted).abs().max() <= 0.05 * wanted.abs().max()
    with Store.open(tmp_path / "store") as store, open_source(str(path)) as source:
        assert store.manifest.recipe["quant"] == "q4_k"
        assert 0 < max(store.manifest.extra["loss"].values()) < 0.006
        notes = make_plan(source.shape, replace(SETTINGS, quant="kept"), MemoryBudget(4 << 30), JOB).notes
    assert notes == (
        "packed again in int8-g32-f16: attention (gguf Q6_K), attention (gguf Q5_0), feed-forward (gguf Q6_K), "
        "feed-forward (gguf Q3_K); --quant kept",
    )


@builds_tokenizers
@pytest.mark.parametrize(("kind", "quant"), [("Q6_K", "int8"), ("Q2_K", "int8"), ("Q4_K", "q4_k")])
def test_auto_loses_no_bits_where_they_fit(kind: str, quant: str, tmp_path: Path) -> None:
    path = to_gguf(build("llama", **WIDE), tmp_path / "model.gguf", kind, save_tokenizer(tmp_path / "tokenizer", 384))
    with open_source(str(path)) as source:
        plan = make_plan(source.shape, replace(SETTINGS, quant="auto"), MemoryBudget(4 << 30), JOB)
    assert plan.quant == quant
    again = f"packed again in int8: attention (gguf {kind}), feed-forward (gguf {kind}); no weight format has their"
    assert [note.startswith(again) for note in plan.notes] == [True] * (quant == "int8")


@builds_tokenizers
def test_gpt_oss_keeps_its_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_logits("gpt_oss", "MXFP4", "kept", tmp_path, monkeypatch)


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1", "Q2_K", "Q3_K", "Q5_K", "IQ4_NL", "IQ3_S"])
def test_weights_of_a_type_are_those_of_gguf(kind: str, tmp_path: Path) -> None:
    model = build("qwen3", **WIDE)
    path = to_gguf(model, tmp_path / "model.gguf", kind)
    state = model.state_dict()
    with GgufCheckpoint(path) as checkpoint:
        weights = read_tensors(read_config(path), checkpoint).quantized
        for name, weight in weights.items():
            assert torch.equal(dequantize(checkpoint, weight, torch.float32).float(), state[name])
    assert {weight.label for weight in weights.values()} == {"fp32", f"gguf {kind}"}


@builds_tokenizers
def test_biases_of_a_llama_are_read_where_the_file_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its metadata say nothing of them, and llama.cpp adds those that it finds."""
    check_logits("llama", "Q8_0", "none", tmp_path, monkeypatch, attention_bias=True, mlp_bias=True)


def test_biases_of_some_matrices_alone_are_refused_in_a_sentence(tmp_path: Path) -> None:
    model = build("llama", attention_bias=True)
    for layer in model.model.layers:
        layer.self_attn.o_proj.bias = None
    path = to_gguf(model, tmp_path / "model.gguf", "Q8_0")
    with pytest.raises(UnsupportedModel, match="only attn_q, attn_k, attn_v have biases"):
        read_shape(path)


@pytest.mark.parametrize("name", ["eos", "eot", "eom"])
def test_an_end_of_text_that_is_no_number_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    path = to_gguf(build("llama"), tmp_path / "model.gguf", "Q8_0")
    with GgufCheckpoint(path) as checkpoint:
        metadata, entries = dict(checkpoint.metadata), checkpoint.entries
    with pytest.raises(UnsupportedModel, match=rf"tokenizer\.ggml\.{name}_token_id is .*, wanted a number"):
        gguf_config({**metadata, f"tokenizer.ggml.{name}_token_id": [1, 2]}, entries)


def test_a_split_file_is_read_from_any_part(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    whole = to_gguf(model, tmp_path / "whole.gguf", "Q8_0")
    first = to_gguf(model, tmp_path / "model.gguf", "Q8_0", num_files=3)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert len(parts) == 3
    assert parts[0] == first
    assert read_shape(first) == read_shape(parts[2]) == read_shape(whole)
    parts[1].rename(tmp_path / "other.gguf")
    with pytest.raises(BadCheckpoint, match=r"model-00002-of-00003\.gguf is missing"):
        read_shape(first)


def test_names_are_those_of_gguf() -> None:
    """Every tensor of a family has the name that gguf's own map gives to it."""
    for family, arch in gguf_files.ARCHITECTURES.items():
        model = build(family)
        number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
        names = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
        for name, tensor in model.state_dict().items():
            wanted = names.get_name(name.removesuffix(".weight").removesuffix(".bias"))
            written = [each for each, *_ in gguf_files._written(name, tensor, model.config)]
            # Some names of stacked experts and gpt-oss's sinks are not in that map.
            assert wanted is None or "gate_up" in name or written[0].startswith(f"{wanted}."), (family, name)


def test_an_expert_is_read_without_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = to_gguf(build("qwen3_moe", **WIDE), tmp_path / "model.gguf", "Q6_K")
    sizes = []
    read_into = GgufCheckpoint.read_into

    def noted(self: GgufCheckpoint, name: str, target: memoryview, begin: int = 0) -> None:
        sizes.append(len(target))
        read_into(self, name, target, begin)

    with GgufCheckpoint(path) as checkpoint:
        weight = read_tensors(read_config(path), checkpoint).quantized["model.layers.1.mlp.experts.3.up_proj.weight"]
        monkeypatch.setattr(GgufCheckpoint, "read_into", noted)
        dequantize(checkpoint, weight, torch.float32)
        assert sizes == [checkpoint.entries["blk.1.ffn_up_exps.weight"].nbytes // 8] == [weight.nbytes]


def test_all_parts_are_fetched_from_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(repository: str, file: str, revision: str | None, local_files_only: bool) -> str:
        assert not local_files_only
        asked.append((repository, file, revision))
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    monkeypatch.setattr(hub, "is_reachable", lambda: True)
    name = "someone/model-GGUF@main/Q4_K_M/model-00002-of-00002.gguf"
    assert find_model(name) == tmp_path / "Q4_K_M/model-00001-of-00002.gguf"
    parts = [f"Q4_K_M/model-0000{part}-of-00002.gguf" for part in (1, 2)]
    assert asked == [("someone/model-GGUF", part, "main") for part in parts]
    with pytest.raises(ModelNotFound, match="neither a file nor a file of a hub repository"):
        find_model("missing/model.gguf")


def test_headers_alone_show_what_lies_in_a_file(tmp_path: Path) -> None:
    path = to_gguf(build("qwen3_moe", **WIDE), tmp_path / "model.gguf", "Q4_K")
    headers = read_headers(str(path))
    stored = {(each["group"], each["format"]): each for each in describe(headers.shape).stored}
    experts = stored["experts", "gguf Q4_K"]
    assert experts["bits"] == 4.5
    assert experts["becomes"] == "kept as q4_k"
    assert headers.shape.num_experts == 16
    assert model_fingerprint(path) == model_fingerprint(path)


@builds_tokenizers
def test_the_tokenizer_and_template_are_those_of_the_file(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer", 384)
    path = to_gguf(build("qwen3"), tmp_path / "model.gguf", "Q8_0", folder)
    messages = [{"role": "user", "content": "Hello there"}]
    with open_source(str(path)) as source, Tokenizer.load(source.folder) as found, Tokenizer.load(folder) as wanted:
        assert found.encode_chat(messages) == wanted.encode_chat(messages)
        assert found.eos_token_ids == wanted.eos_token_ids


TEXTS = [
    "Hello there", " Hello", "   three", "a  b\n\n    return [each for each in 12345]\t", "<think>no</think>",
    "a<think> b", "\U0001F999 caf\u00e9 \u4f60\u597d", "x</s>\ny", "\n", "def written(name: str) -> None:",
]  # fmt: skip


@builds_tokenizers
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("arch", "family", "prefix"), [("llama", "Llama", None), ("llama", "Llama", False), ("gemma2", "Gemma", None)]
)
def test_sentencepiece_tokens_are_those_of_the_tokenizer_that_the_file_was_made_from(
    arch: str, family: str, prefix: bool | None, tmp_path: Path
) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = save_sentencepiece(tmp_path / "tokenizer", 384, family=family, prefix=prefix)
    prefixed = family == "Llama" and prefix is not False
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    path = to_gguf(build(arch), tmp_path / "model.gguf", "Q8_0", folder)
    messages = [{"role": "user", "content": "Hello there"}]
    with open_source(str(path)) as source, Tokenizer.load(source.folder) as found, Tokenizer.load(folder) as wanted:
        for text in TEXTS:
            assert found.encode(text) == wanted.encode(text), text
            assert found.decode(found.encode(text)) == wanted.decode(wanted.encode(text)), text
            # transformers puts a space before neither a space nor an added token.
            if not prefixed or not text.startswith((" ", "<think>")):
                assert found.encode(text) == [pieces.bos_id(), *pieces.encode(text)], text
        assert found.encode_chat(messages) == wanted.encode_chat(messages)
        assert found.eos_token_ids == wanted.eos_token_ids


def test_a_transformers_that_misreads_tokenizers_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = to_gguf(build("qwen3"), tmp_path / "model.gguf", "Q8_0", save_tokenizer(tmp_path / "tokenizer", 384))
    monkeypatch.setattr(errors, "version", lambda package: "5.17.0")
    with pytest.raises(
        OldTransformers, match=r"needs transformers 5\.18 or newer, and 5\.17\.0 is installed: pip install"
    ):
        gguf_tokenizer.write_tokenizer(path, tmp_path)


def test_llama_3_scaling_is_recognized_by_its_factors(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 500_000.0,
    }  # fmt: skip
    model = build("llama", rope_parameters=rope, max_position_embeddings=131_072)
    path = to_gguf(model, tmp_path / "model.gguf", "Q8_0", factors=True)
    assert read_config(path).get("rope_parameters") == rope
    other = to_gguf(model, tmp_path / "other.gguf", "Q8_0", factors=True, spoiled=True)
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight is not the scaling of Llama 3"):
        read_config(other)


def test_architectures_that_are_not_read_are_refused_in_a_sentence(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "falcon")
    writer.add_tensor("token_embd.weight", torch.ones(4, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="architecture 'falcon' is not read; wanted one of afmoe, "):
        read_shape(tmp_path / "model.gguf")
