"""lm-eval's view of a model: what it scores and generates is what transformers does, under lm-eval's own rules."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
import torch

# Read when lm-eval imports what else it needs.
os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}

from moedge import LLM, MoedgeLM
from moedge.apps.evaluation.command import results_json, write_samples
from moedge.apps.evaluation.harness import evaluate, task_manager
from moedge.runtime.settings.errors import BadArgument
from moedge.runtime.settings.options import LLMOptions

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "examples/tiny_moe/model"
TASKS = ("last_word", "second_half", "continue_verse")
EXACT: LLMOptions = {
    "ram": "3GiB", "gpu_mem": 0, "dtype": "fp32", "quant": "none", "kv": "fp32", "deterministic": True,
}  # fmt: skip
VERSE = "And the famine was sore in the land. And it came to pass, when they had eaten up the corn"


class Asked(NamedTuple):
    """What lm-eval's `Instance` is to a model."""

    args: tuple[Any, ...]


@pytest.fixture(scope="module")
def lm() -> Iterator[MoedgeLM]:
    with LLM(DEMO, rows=40, prompt_tokens=60, output_tokens=8, max_model_len=200, **EXACT) as llm:
        yield MoedgeLM(llm)


@pytest.fixture(scope="module")
def likelihood(stock: Callable[[Path], Any]) -> Callable[[list[int], int], tuple[float, bool]]:
    """The log-likelihood of the last tokens of a prompt, and whether each is the likeliest, by transformers."""

    def score(token_ids: list[int], count: int) -> tuple[float, bool]:
        with torch.no_grad():
            logits = stock(DEMO)(torch.tensor([token_ids[:-1]])).logits[0, -count:].float().log_softmax(-1)
        wanted = torch.tensor(token_ids[-count:])
        greedy = bool((logits.argmax(-1) == wanted).all())
        return float(logits.gather(-1, wanted[:, None]).sum()), greedy

    return score


def test_continuations_are_scored_as_transformers_does(
    lm: MoedgeLM, likelihood: Callable[[list[int], int], tuple[float, bool]]
) -> None:
    """With a common context, twice the same, a space at the end of it, no context, and one that is too long."""
    pairs = [(VERSE, " of Egypt"), (VERSE, " which they had"), (VERSE, " of Egypt"), ("And he ", "said"), ("", "And")]
    pairs.append((VERSE * 20, " of Egypt"))
    found = lm.loglikelihood([Asked(pair) for pair in pairs], disable_tqdm=True)
    assert found[0] == found[2]
    for (context, continuation), (score, greedy) in zip(pairs, found, strict=True):
        ids = lm.tok_encode(context + continuation) if context else [lm.prefix_token_id, *lm.tok_encode(continuation)]
        count = len(ids) - (len(lm.tok_encode(context.rstrip())) if context else 1)
        wanted, likeliest = likelihood(ids[-(lm.max_length + 1) :], count)
        assert score == pytest.approx(wanted, abs=1e-4)
        assert greedy == likeliest
    assert lm.llm.max_model_len == lm.max_length + 2


def test_the_file_of_results_fits_its_schema(lm: MoedgeLM) -> None:
    manager = task_manager(["last_word"], ROOT / "examples/evaluation", defaults=False)
    found = evaluate(lm, ["last_word"], manager, limit=1, bootstrap_iters=0)
    found["results"]["last_word"]["perplexity_stderr,none"] = float("nan")
    schema = json.loads((ROOT / "docs/schemas/eval-1.json").read_text())
    jsonschema.validate(json.loads(results_json(found), parse_constant=pytest.fail), schema)


def test_samples_are_those_that_lm_eval_keeps(lm: MoedgeLM, tmp_path: Path) -> None:
    tasks = ["last_word", "continue_verse"]
    manager = task_manager(tasks, ROOT / "examples/evaluation", defaults=False)
    found = evaluate(lm, tasks, manager, limit=2, bootstrap_iters=0, log_samples=True)
    write_samples(tmp_path / "new" / "folder", found["samples"])
    written = {path.name: path.read_text().splitlines() for path in (tmp_path / "new" / "folder").iterdir()}
    assert written.keys() == {f"samples_{task}.jsonl" for task in tasks}
    for task in tasks:
        kept = [json.loads(line) for line in written[f"samples_{task}.jsonl"]]
        assert [one["doc_id"] for one in kept] == [0, 1]
        for line, one in zip(kept, found["samples"][task], strict=True):
            assert line["doc"] == one["doc"]
            assert line["filtered_resps"] == json.loads(json.dumps(one["filtered_resps"]))
    assert all(one["resps"][0][0] for one in found["samples"]["continue_verse"]), "texts that were generated"


def test_what_is_common_is_read_once(lm: MoedgeLM) -> None:
    choices = [Asked((VERSE * 3, f" {word}")) for word in ("one", "two", "corn", "land")]
    lm.loglikelihood(choices, disable_tqdm=True)
    context, counts = len(lm.tok_encode(VERSE * 3)), lm.llm._engine.engine.engine.scheduler.counts
    assert counts.prefix_hit_tokens > 2.5 * context


@pytest.mark.slow
def test_whole_texts_are_scored_in_windows(
    lm: MoedgeLM, likelihood: Callable[[list[int], int], tuple[float, bool]]
) -> None:
    ids = lm.tok_encode(text := VERSE * 20)
    assert 2 * lm.max_length < len(ids)
    wanted, ahead = 0.0, [lm.prefix_token_id, *ids]
    for begin in range(0, len(ids), lm.max_length):
        end = min(begin + lm.max_length, len(ids))
        first = max(0, end - lm.max_length)
        wanted += likelihood(ahead[first : end + 1], end - begin)[0]
    [found, nothing] = lm.loglikelihood_rolling([Asked((text,)), Asked(("",))], disable_tqdm=True)
    assert found == pytest.approx(wanted, rel=1e-6)
    assert nothing == 0


@pytest.mark.slow
def test_answers_end_before_the_first_of_their_stops(lm: MoedgeLM, stock: Callable[[Path], Any]) -> None:
    given = {"do_sample": False, "max_gen_toks": 30}
    [free, cut] = lm.generate_until(
        [Asked((VERSE, {**given, "until": []})), Asked((VERSE, {**given, "until": ["#", " the", "qqq", ""]}))], True
    )
    ids = torch.tensor([lm.tok_encode(VERSE)])
    wanted = stock(DEMO).generate(ids, max_new_tokens=30, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert free == lm.llm.get_tokenizer().decode(wanted.tolist())
    assert " the" in free
    assert cut == free.split(" the")[0]
    with pytest.raises(BadArgument, match="num_beams are not known"):
        lm.generate_until([Asked((VERSE, {"num_beams": 3, "max_gen_toks": 5}))], True)
    with pytest.raises(BadArgument, match="lower max_gen_toks"):
        lm.generate_until([Asked((VERSE, {"max_gen_toks": 198}))], True)


def test_a_conversation_becomes_the_text_of_its_template(lm: MoedgeLM) -> None:
    text = lm.apply_chat_template([{"role": "user", "content": "Speak."}])
    encoded = lm.llm.get_tokenizer().encode_chat([{"role": "user", "content": "Speak."}])
    assert lm.tok_encode(text, add_special_tokens=False) == encoded
    assert lm.chat_template(True)
    assert lm.chat_template(False) is None
    with pytest.raises(BadArgument, match="gen_prefix"):
        lm.apply_chat_template([{"role": "user", "content": "Speak."}], add_generation_prompt=False)


@pytest.mark.slow
def test_results_are_those_of_lm_evals_own_model(lm: MoedgeLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.api.registry import get_model
    from lm_eval.models.huggingface import HFLM

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert get_model("moedge") is MoedgeLM
    manager = task_manager(TASKS, ROOT / "examples/evaluation", defaults=False)
    theirs = HFLM(str(DEMO), dtype="float32", device="cpu", batch_size=1, max_length=lm.max_length)
    options: Any = {"task_manager": manager, "tasks": list(TASKS), "bootstrap_iters": 0}
    found, wanted = (simple_evaluate(model, **options) for model in (lm, theirs))
    assert found is not None
    assert wanted is not None
    for task in TASKS:
        pairs = zip(found["samples"][task], wanted["samples"][task], strict=True)
        for ours, other in pairs:
            for [mine], [yours] in zip(ours["resps"], other["resps"], strict=True):
                assert mine == (yours if isinstance(yours, str) else (pytest.approx(yours[0], abs=1e-4), yours[1]))
        assert {"acc", "exact_match"} & {name.partition(",")[0] for name in found["results"][task]}
        assert {name: value for name, value in found["results"][task].items() if value != "N/A"} == {
            name: pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            for name, value in wanted["results"][task].items()
            if value != "N/A"
        }
    few = evaluate(lm, ["second_*"], manager, limit=3, bootstrap_iters=0, num_fewshot=0)
    assert few["n-samples"]["second_half"]["effective"] == 3
    with pytest.raises(BadArgument, match="has no task third_half"):
        task_manager(["third_half"], ROOT / "examples/evaluation", defaults=False)
