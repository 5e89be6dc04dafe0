"""A dense model cut into experts computes what it did where all of them are used; two cuts have the same bytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from bench import make_real_mixture as cutting
from support.tiny_families import save_tiny

# SmolLM2-135M's layers, two of them.
WIDTHS = {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "num_hidden_layers": 2,
}  # fmt: skip


NUM_EXPERTS = 24


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Any]:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    save_tiny("llama", folder, **WIDTHS, tie_word_embeddings=True)
    return cutting.load(folder)


@pytest.fixture(scope="module")
def cuts(dense: tuple[LlamaForCausalLM, Any]) -> list[cutting.Cut]:
    return cutting.cut(dense[0], token_ids(dense[0], 0), NUM_EXPERTS)


def token_ids(model: LlamaForCausalLM, seed: int) -> torch.Tensor:
    return torch.randint(3, model.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(seed))


def written(dense: tuple[LlamaForCausalLM, Any], cuts: list[cutting.Cut], per_token: int, out: Path) -> Any:
    cutting.write(*dense, cuts, per_token, torch.float32, out)
    return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()


@torch.no_grad()
def test_with_all_experts_it_is_the_dense_model(
    dense: tuple[LlamaForCausalLM, Any], cuts: list[cutting.Cut], tmp_path: Path
) -> None:
    mixture, ids = written(dense, cuts, NUM_EXPERTS, tmp_path / "all"), token_ids(dense[0], 1)
    wanted = dense[0](ids).logits
    assert mixture.config.model_type == "mixtral"
    assert (mixture(ids).logits - wanted).abs().max() < 1e-2 * wanted.std()


@torch.no_grad()
def test_chosen_experts_weigh_the_same_and_tokens_choose_others(
    dense: tuple[LlamaForCausalLM, Any], cuts: list[cutting.Cut], tmp_path: Path
) -> None:
    mixture, found = written(dense, cuts, 7, tmp_path / "some"), []
    for module in mixture.modules():
        if type(module).__name__ == "MixtralTopKRouter":
            module.register_forward_hook(lambda one, args, out: found.append(out[1:]))
    mixture(token_ids(dense[0], 2))
    assert len(found) == WIDTHS["num_hidden_layers"]
    for weights, chosen in found:
        assert (weights - 1 / 7).abs().max() < 1e-3
        assert len({tuple(sorted(row)) for row in chosen.tolist()}) > len(chosen) / 4


@torch.no_grad()
def test_the_table_judges_what_is_written(
    dense: tuple[LlamaForCausalLM, Any], cuts: list[cutting.Cut], tmp_path: Path
) -> None:
    """Perplexity by the number of experts is computed with the dense model's matrices, without a checkpoint."""
    model, ids = dense[0], token_ids(dense[0], 3)
    whole = model(ids).logits
    with cutting.routed(model, cuts, 7):
        routed = model(ids).logits
    found = written(dense, cuts, 7, tmp_path / "some")(ids).logits

    def agreeing(logits: torch.Tensor) -> float:
        return float(((logits - routed).abs().amax(-1) < 5e-3 * whole.std()).float().mean())

    # A softmax of nearly equal scores rounds some that differ to the same number, and another of two experts is chosen.
    assert agreeing(found) > 0.8
    assert agreeing(whole) < 0.1
    assert torch.equal(model(ids).logits, whole)


def test_two_runs_write_the_same_bytes(dense: tuple[LlamaForCausalLM, Any], tmp_path: Path) -> None:
    for name in ("once", "again"):
        cuts = cutting.cut(dense[0], token_ids(dense[0], 0), 4)
        cutting.write(*dense, cuts, 2, torch.bfloat16, tmp_path / name)
    first, second = ({path.name: path.read_bytes() for path in (tmp_path / one).iterdir()} for one in ("once", "again"))
    assert first == second
    assert first.keys() >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_neurons_that_are_active_together_share_an_expert() -> None:
    generator = torch.Generator().manual_seed(0)
    owner = torch.randperm(1536, generator=generator) % 24
    topics = torch.rand(400, 24, generator=generator) ** 4
    strength = topics[:, owner] * torch.rand(1536, generator=generator) + 0.02 * torch.rand(
        400, 1536, generator=generator
    )
    clusters = cutting.cluster(strength, 24)
    assert sorted(clusters.flatten().tolist()) == list(range(1536))
    purest = [owner[each].bincount().max().item() / len(each) for each in clusters]
    assert sum(purest) / len(purest) > 0.8


def test_a_router_is_fitted_to_what_it_shall_predict() -> None:
    generator = torch.Generator().manual_seed(0)
    states, router = torch.randn(2000, 576, generator=generator), torch.randn(24, 576, generator=generator)
    found = cutting.fit(states, states @ router.T)
    assert (found @ states[:50].T).argmax(0).tolist() == (router @ states[:50].T).argmax(0).tolist()


def test_every_cluster_gets_as_many_items() -> None:
    similarity = torch.zeros(6, 3)
    similarity[:, 1] = torch.tensor([6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    similarity[3, 2] = 2.5
    assert cutting.balanced(similarity).tolist() == [[2, 4], [0, 1], [3, 5]]
