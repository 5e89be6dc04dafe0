"""Models with latent attention (`runtime/attention/latent.py`) without `--deterministic`: prompts that expand latents,
generated tokens that do not.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moedge.quant.kv.codec import decode, encode, rotation
from moedge.quant.kv.format import VECTOR_FORMATS
from moedge.runtime.attention.latent import LatentAttention, TokenChooser
from moedge.runtime.attention.protocol import AttentionCall, IndexQuery, LatentWeights
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import MemoryBudget, Settings
from moedge.runtime.shape.families import INDEXED, LATENT
from moedge.runtime.source.model_source import open_source
from support.family_run import LENGTHS, NEW_TOKENS, prompts
from support.heldout import predict

WINDOW = 160


def load(folder: Path, **settings: Any) -> Any:
    plain = {"dtype": "fp32", "quant": "none", "kv": "fp32"}
    job = Workload(len(LENGTHS), max(WINDOW, max(LENGTHS) + NEW_TOKENS))
    with open_source(str(folder)) as source:
        plan = make_plan(source.shape, Settings(**plain | settings), MemoryBudget(4 << 30), job)
        return load_engine(source, plan)


@pytest.mark.sample("deepseek_v3")
@pytest.mark.parametrize("family", sorted(LATENT))
def test_tokens_are_those_of_transformers(
    family: str, checkpoint: Callable[[str], Path], stock: Callable[[Path], Any]
) -> None:
    found = []
    for tokens_per_pass, max_sequences in ((16, 3), (1024, 64)):
        with closing(load(checkpoint(family), tokens_per_pass=tokens_per_pass, max_sequences=max_sequences)) as loaded:
            sequences = [Sequence(ids, SequenceSampling(NEW_TOKENS), frozenset({2})) for ids in prompts()]
            for sequence in sequences:
                loaded.engine.add(sequence)
            list(loaded.engine.run())
            backend = loaded.model.attention
            assert isinstance(backend, LatentAttention)
            layers = len(loaded.engine.scheduler.cache.layer_indices)
            # A whole prompt of one token is a generated one to attention.
            generated = sum(len(sequence.output_ids) - 1 for sequence in sequences) + LENGTHS.count(1)
            assert generated > len(LENGTHS) * NEW_TOKENS / 2
            assert backend.num_absorbed >= layers * generated
            assert (backend.chooser.num_chosen > 0) == (family in INDEXED)
            chunks = backend.num_expanded // layers
            assert chunks > len(LENGTHS) if tokens_per_pass == 16 else chunks == len(LENGTHS) - LENGTHS.count(1)
        found.append([sequence.output_ids for sequence in sequences])
    model = stock(checkpoint(family))
    for row, ids in enumerate(prompts()):
        wanted = model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        assert [tokens[row] for tokens in found] == [wanted[0, len(ids) :].tolist()] * 2


@pytest.mark.parametrize("deterministic", [False, True])
def test_tokens_that_an_indexer_does_not_choose_are_left_out(
    deterministic: bool,
    checkpoint: Callable[[str], Path],
    stock: Callable[[Path], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: attention to all tokens gives others, from the one on that reaches back farther."""
    ids = torch.randint(5, 380, (40,), generator=torch.Generator().manual_seed(4)).tolist()
    model, found = stock(checkpoint("glm_moe_dsa")), []
    wanted = model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    for leaves_out in (AttentionCall.leaves_out, lambda self, length: False):
        monkeypatch.setattr(AttentionCall, "leaves_out", leaves_out)
        with closing(load(checkpoint("glm_moe_dsa"), deterministic=deterministic)) as loaded:
            sequence = Sequence(ids, SequenceSampling(NEW_TOKENS), frozenset({2}))
            loaded.engine.add(sequence)
            list(loaded.engine.run())
            found.append(sequence.output_ids)
    assert found[0] == wanted[0, len(ids) :].tolist() != found[1]


def predicted(folder: Path, kv: str) -> torch.Tensor:
    """Log probabilities [n, V] of what may follow each token of a text, with a cache in the format."""
    token_ids = torch.randint(5, 380, (WINDOW,), generator=torch.Generator().manual_seed(2)).tolist()
    with closing(load(folder, kv=kv, tokens_per_pass=40)) as loaded:
        assert loaded.engine.scheduler.cache.pools[0].quantized == (kv != "fp32")
        return torch.cat(list(predict(loaded.engine, token_ids)))


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """The mean KL divergence, in nats per token."""
    return float((p.exp() * (p - q)).sum(-1).mean())


def quantized(x: torch.Tensor, kv: str, *, rotate: bool) -> torch.Tensor:
    """Vectors [T, H, D] as the format keeps them, where `rotate` as it keeps keys."""
    matrix = rotation(x.shape[-1]) if rotate else torch.eye(x.shape[-1])
    vectors = VECTOR_FORMATS[kv]
    return decode(encode(x @ matrix, vectors), vectors, x.dtype) @ matrix.T


@pytest.mark.slow
@pytest.mark.parametrize("family", ["axk2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "youtu"])
@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_quantized_latents_lose_at_most_twice_what_the_keys_and_values_of_all_heads_do(
    kv: str, family: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same model: random ones differ much in what a small error becomes on its way through the layers.

    Where an indexer chooses tokens, its keys are in 8 bits on both sides: a choice is not rounded but made otherwise.
    """
    folder, expand, store = checkpoint(family), LatentWeights.expand, TokenChooser.store
    exact = predicted(folder, "fp32")
    latents = divergence(exact, predicted(folder, kv))

    def rounded(self: LatentWeights, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = expand(self, *rest)
        return quantized(keys, kv, rotate=True), quantized(values, kv, rotate=False)

    def store_rounded(self: TokenChooser, index: IndexQuery, batch: Any) -> None:
        store(self, replace(index, k=quantized(index.k, "int8", rotate=True)), batch)

    monkeypatch.setattr(LatentWeights, "expand", rounded)
    monkeypatch.setattr(TokenChooser, "store", store_rounded)
    assert 0 < latents <= 2 * divergence(exact, predicted(folder, "fp32"))


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_families_whose_layers_drop_arguments_lose_at_most_twice_what_others_do(
    kv: str, checkpoint: Callable[[str], Path]
) -> None:
    lost = {
        family: divergence(*(predicted(checkpoint(family), each) for each in ("fp32", kv)))
        for family in ("llama", "nemotron", "stablelm")
    }
    assert 0 < max(lost.values()) <= 2 * lost["llama"]
