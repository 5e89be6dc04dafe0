"""Whatever the model says, the text is JSON of the schema, on every schedule (`runtime/sampling/grammar.py`,
`runtime/engine/engine.py`).
"""

import json
import threading
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moedge.runtime.engine.engine import Engine, MaskThread
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.sampling.grammar import ANY_OBJECT, Grammars, GrammarState, Lark
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.text.tokenizer import Tokenizer
from support.oracle import foresee

from .conftest import VOCAB, noise_engine

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
MAX_TOKENS = 1000

# Schemas whose texts are bounded, so that noise comes to an end.
names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=4)
values = st.one_of(st.booleans(), st.none(), st.integers(-1000, 1000), names)
leaves = st.one_of(
    st.builds(lambda a, b: {"type": "string", "minLength": a, "maxLength": a + b}, *[st.integers(0, 4)] * 2),
    st.builds(lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more}, *[st.integers(-99, 99)] * 2)
    .filter(lambda schema: schema["maximum"] >= schema["minimum"]),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string", "pattern": "^[a-f]{2,5}$"}]),
    st.sampled_from([{"type": "string", "format": "date"}, {"type": ["boolean", "null"]}]),
    st.builds(lambda items: {"enum": items}, st.lists(values, min_size=1, max_size=4)),
    st.builds(lambda item: {"const": item}, values),
)  # fmt: skip


def objects(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(properties: dict[str, Any], number_required: int) -> dict[str, Any]:
        required = list(properties)[:number_required]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.builds(build, st.dictionaries(names, children, max_size=4), st.integers(0, 4))


def arrays(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(items: Any, low: int, more: int) -> dict[str, Any]:
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + more}

    return st.builds(build, children, st.integers(0, 2), st.integers(0, 2))


schemas = st.recursive(
    leaves,
    lambda children: st.one_of(
        objects(children),
        arrays(children),
        st.builds(lambda either: {"anyOf": either}, st.lists(children, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


def start(
    grammars: Grammars, tokenizer: Tokenizer, schema: object, seed: int = 0, max_tokens: int = MAX_TOKENS
) -> Sequence:
    params = SequenceSampling(max_tokens, temperature=1.0, seed=seed)
    eos_ids = frozenset(tokenizer.eos_token_ids)
    return Sequence([5, 6, 7], params, eos_ids, text=tokenizer.stream(), grammar=grammars.start(json.dumps(schema)))


def text(sequence: Sequence) -> str:
    sequence.text.finish()  # type: ignore[union-attr]
    return sequence.text.text  # type: ignore[union-attr,no-any-return]


def run(engine: Engine, sequences: list[Sequence]) -> None:
    for sequence in sequences:
        engine.add(sequence)
    list(engine.run())
    engine.close()


@given(st.lists(schemas, min_size=1, max_size=4), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_noise_becomes_json_of_the_schema(
    grammars: Grammars, tokenizer: Tokenizer, asked: list[Any], seed: int
) -> None:
    sequences = [start(grammars, tokenizer, schema, seed + index) for index, schema in enumerate(asked)]
    run(noise_engine(blocks=300), sequences)
    for sequence, schema in zip(sequences, asked, strict=True):
        assert sequence.finish_reason == "stop", (schema, text(sequence), sequence.error)
        jsonschema.validate(json.loads(text(sequence)), schema)


def test_without_a_grammar_noise_is_no_json(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """The control: nothing but the masks makes the texts valid."""
    sequence = start(grammars, tokenizer, PERSON, max_tokens=30)
    sequence.grammar = None
    run(noise_engine(), [sequence])
    with pytest.raises(json.JSONDecodeError):
        json.loads(text(sequence))


def test_preemption_and_neighbours_do_not_show_in_the_text(grammars: Grammars, tokenizer: Tokenizer) -> None:
    def all_texts(engine: Engine) -> list[str]:
        sequences = [start(grammars, tokenizer, PERSON, seed, max_tokens=100) for seed in range(12)]
        # Neighbours without a grammar share the passes.
        loose = [Sequence([8, 9], SequenceSampling(40, temperature=1.0, seed=seed)) for seed in range(4)]
        run(engine, [*sequences, *loose])
        assert {sequence.finish_reason for sequence in sequences} == {"stop"}
        return [text(sequence) for sequence in sequences]

    roomy, tight = noise_engine(blocks=400), noise_engine(blocks=7)
    assert all_texts(roomy) == all_texts(tight)
    assert roomy.scheduler.counts.preemptions == 0
    assert tight.scheduler.counts.preemptions > 0


def test_drafted_tokens_pass_their_grammar_one_after_the_other(grammars: Grammars, tokenizer: Tokenizer) -> None:
    plain, drafting = ([start(grammars, tokenizer, PERSON, seed, 100) for seed in range(8)] for _ in range(2))
    run(noise_engine(), plain)
    # Behind the end of an object there is nothing, whatever is drafted.
    for seed, (ours, theirs) in enumerate(zip(drafting, plain, strict=True)):
        foresee(ours, [*theirs.output_ids, 8, 9, 10], 9, seed)
    engine = noise_engine(free_tokens=(24, 32, 40, 40))
    run(engine, drafting)
    assert [each.output_ids for each in drafting] == [each.output_ids for each in plain]
    assert {(each.finish_reason, each.error) for each in drafting} == {("stop", "")}
    assert 100 < engine.metrics.accepted_tokens < engine.metrics.drafted_tokens


def test_samples_of_one_prompt_part_with_grammars_of_their_own(grammars: Grammars, tokenizer: Tokenizer) -> None:
    first, *others = (start(grammars, tokenizer, PERSON, seed) for seed in range(5))
    first.forks = others
    alone = [start(grammars, tokenizer, PERSON, seed) for seed in range(5)]
    engine = noise_engine()
    run(engine, [first])
    run(noise_engine(), alone)
    assert engine.scheduler.counts.prefix_hit_tokens > 0
    assert [text(sequence) for sequence in (first, *others)] == [text(sequence) for sequence in alone]
    for sequence in (first, *others):
        jsonschema.validate(json.loads(text(sequence)), PERSON)


@given(st.integers(0, 30))
@settings(max_examples=10, deadline=None)
def test_the_state_is_a_function_of_the_tokens(grammars: Grammars, tokenizer: Tokenizer, count: int) -> None:
    sequence = start(grammars, tokenizer, PERSON)
    run(noise_engine(), [sequence])
    first, again = (grammars.start(json.dumps(PERSON)) for _ in range(2))
    for token_id in sequence.output_ids[:count]:
        first.append(token_id)
    assert again.matcher.consume_tokens(sequence.output_ids[:count])
    assert first.complete == again.matcher.is_stopped()
    if not first.complete:
        assert first.matcher.compute_bitmask() == again.matcher.compute_bitmask()


def test_a_mask_allows_what_the_grammar_takes_and_nothing_else(grammars: Grammars, tokenizer: Tokenizer) -> None:
    sequence = start(grammars, tokenizer, PERSON)
    run(noise_engine(), [sequence])
    state = grammars.start(json.dumps(PERSON))
    for token_id in sequence.output_ids:
        bits = np.frombuffer(state.matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")
        assert not allowed[tokenizer.num_tokens :].any(), "padding of the vocabulary is no text"
        taken = [state.matcher.validate_tokens([other]) for other in range(0, tokenizer.num_tokens, 7)]
        assert taken == allowed[: tokenizer.num_tokens : 7].tolist()
        state.append(token_id)
    assert state.complete


def test_a_bare_number_ends_with_the_models_end_token(grammars: Grammars, tokenizer: Tokenizer) -> None:
    sequence = start(grammars, tokenizer, {"type": "integer"})
    run(noise_engine(), [sequence])
    assert sequence.output_ids[-1] in tokenizer.eos_token_ids
    assert isinstance(json.loads(text(sequence)), int)


def test_any_object_is_an_object(grammars: Grammars, tokenizer: Tokenizer) -> None:
    sequences = [start(grammars, tokenizer, json.loads(ANY_OBJECT), seed, max_tokens=300) for seed in range(8)]
    run(noise_engine(), sequences)
    done = [json.loads(text(sequence)) for sequence in sequences if sequence.finish_reason == "stop"]
    assert done
    assert all(isinstance(value, dict) for value in done)


def test_masks_are_made_while_the_model_computes(
    grammars: Grammars, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model waits in its pass for the masks of that pass: were they made after it, it would wait in vain."""
    made = threading.Semaphore(0)
    compute = MaskThread._compute

    def announced(self: MaskThread, *work: Any) -> Any:
        masks = compute(self, *work)
        made.release()
        return masks

    monkeypatch.setattr(MaskThread, "_compute", announced)
    engine = noise_engine()
    forward = engine.model.forward
    monkeypatch.setattr(engine.model, "forward", lambda batch: made.acquire(timeout=30) and forward(batch))
    sequence = start(grammars, tokenizer, PERSON)
    run(engine, [sequence])
    assert sequence.finish_reason == "stop"


def test_a_grammar_that_breaks_ends_its_own_sequence_only(grammars: Grammars, tokenizer: Tokenizer) -> None:
    broken, whole = start(grammars, tokenizer, PERSON), start(grammars, tokenizer, PERSON)
    assert broken.grammar is not None
    broken.grammar.matcher.consume_token(3000)
    run(noise_engine(), [broken, whole])
    assert (broken.finish_reason, broken.output_ids) == ("error", [])
    assert "schema cannot be followed" in broken.error
    assert whole.finish_reason == "stop"


def test_copies_of_one_schema_go_their_own_ways(grammars: Grammars) -> None:
    first, second = (grammars.start('{"enum": ["a", "b"]}') for _ in range(2))
    before = second.matcher.compute_bitmask()
    first.append(int(np.unpackbits(np.frombuffer(before, np.uint8), bitorder="little").argmax()))
    assert second.matcher.compute_bitmask() == before
    assert isinstance(first, GrammarState)
    assert 32 * first.mask_words >= VOCAB


@pytest.mark.parametrize("count", [3000, 10_000])
def test_thousands_of_labels_are_a_choice(count: int, tokenizer: Tokenizer) -> None:
    labels = [
        f"Category {index:05} / {('red', 'green')[index % 2]} (sub-{index * 7919 % 1000})" for index in range(count)
    ]
    grammars = Grammars(tokenizer, tokenizer.num_tokens)
    for label in (labels[0], labels[count // 2], labels[-1]):
        state = grammars.start(Lark.of_choice(labels))
        for token_id in tokenizer.encode_verbatim(label, add_special_tokens=False):
            state.matcher.compute_bitmask()
            state.append(token_id)
            assert not state.error
        assert state.complete


ODD = [
    "/",
    "a/b",
    "\\",
    "\n",
    '"',
    "日本",
    "é_x",
    "a|b",
    "(",
    "[x]",
    "$5",
    "{n}",
    "\U0001f600",
    "%json",
    "a",
    "ab",
    "abc",
]


@pytest.mark.parametrize("label", ODD)
def test_a_choice_is_its_text_and_no_pattern(label: str, tokenizer: Tokenizer) -> None:
    state = Grammars(tokenizer, tokenizer.num_tokens).start(Lark.of_choice([*ODD, *("a" * n for n in range(1, 200))]))
    for token_id in tokenizer.encode_verbatim(label, add_special_tokens=False):
        state.matcher.compute_bitmask()
        state.append(token_id)
        assert not state.error
    assert state.complete or label in ("a", "ab", "/") or state.matcher.is_accepting()
