"""Small tokenizers with the marks and templates of thinking models, and engines whose answers are written here."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from moedge.runtime.engine.engine import Engine
from moedge.runtime.engine.scheduler import PassLimits, Scheduler
from moedge.runtime.engine.sequence import Batch
from moedge.runtime.jobs.encode import RowEncoder
from moedge.runtime.jobs.journal.state import CutChoice, Done
from moedge.runtime.jobs.run import RowRunner
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import KVPool
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.rows.answer_formats import Answers
from moedge.runtime.rows.reader import rows_from
from moedge.runtime.rows.row import Defaults, Row, RowFailure
from moedge.runtime.sampling.sampler import Sampler
from moedge.runtime.shape.model_shape import KVGroup
from moedge.runtime.text.tokenizer import Tokenizer

QWEN3 = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '\nAnswer with <tool_call></tool_call><|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}"
    "{{- m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)
OPENED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n<think>\n' }}{# </think> #}"
)
HARMONY = (
    "{{ '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}"
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endfor %}"
    "{{ '<|start|>assistant' }}{# <|channel|> #}"
)
SPELLED = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '[A]<thought>' }}{# </thought> #}"
TEMPLATES = {"qwen3": QWEN3, "opened": OPENED, "harmony": HARMONY, "spelled": SPELLED}
MARKS = {
    "qwen3": ["<think>", "</think>", "<tool_call>", "</tool_call>"],
    "opened": ["<think>", "</think>"],
    "harmony": [],
    "spelled": [],
}
CHATML = ["<|im_start|>", "<|im_end|>"]
CHANNELS = [f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call")]


def bytes_tokenizer(special: Sequence[str], marks: Sequence[str]) -> Backend:
    """A token for each byte, and the marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Backend(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return tokenizer


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Tokenizer]]:
    """`load(name)` is the tokenizer with the template of that name."""
    from transformers import PreTrainedTokenizerFast

    base, loaded = tmp_path_factory.mktemp("thinking"), {}

    def tokenizer(name: str) -> Tokenizer:
        if name not in loaded:
            special, end = (CHANNELS, "<|return|>") if name == "harmony" else (CHATML, "<|im_end|>")
            backend = bytes_tokenizer(special, MARKS[name])
            saved = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, chat_template=TEMPLATES[name])
            saved.save_pretrained(str(base / name))
            loaded[name] = Tokenizer.load(Path(base / name))
        return loaded[name]

    yield tokenizer
    for each in loaded.values():
        each.close()


class ScriptedModel:
    """Wants the tokens of a script, one after the other, whatever was taken instead; noise behind its end.

    `scripts` has them by the token ids of the prompt; a prompt without one gets noise.
    """

    def __init__(self, vocab: int, scripts: dict[tuple[int, ...], Sequence[int]]) -> None:
        self.vocab, self.scripts = vocab, scripts

    def forward(self, batch: Batch) -> torch.Tensor:
        rows = [torch.zeros(0, self.vocab)]
        for chunk in batch.chunks:
            for sequence in chunk.sampling:
                position = len(sequence.output_ids)
                seed = hash((*sequence.tokens(0, chunk.past + chunk.count), sequence.params.seed)) % (1 << 63)
                noise = torch.randn(1, self.vocab, generator=torch.Generator().manual_seed(seed))
                script = self.scripts.get(tuple(sequence.prompt_ids), ())
                if position < len(script):
                    noise[0, script[position]] += 100
                rows.append(noise)
        return torch.cat(rows)


class Rows:
    """A source of rows, and a journal of their answers; `before` has those of cut rows, which are continued."""

    def __init__(self, rows: list[Row], before: Mapping[int, Done]) -> None:
        self.waiting, self.found, self.before = list(rows), dict[int, Done](), before

    @property
    def exhausted(self) -> bool:
        return not self.waiting

    def take(self, most: int, alone: bool) -> list[Row]:
        taken, self.waiting = self.waiting[:most], self.waiting[most:]
        return taken

    def partial(self, row: int) -> tuple[CutChoice, ...]:
        return self.before[row].choices if row in self.before else ()

    def answered(self, row: int) -> bool:
        return row in self.before

    def progress(self, rows: Mapping[int, Any]) -> None:
        pass

    def digest(self, row: int) -> str:
        return ""

    def begin(self, rows: list[int]) -> None:
        pass

    def done(self, *done: Done) -> None:
        self.found.update((each.row, each) for each in done)


Load = Callable[[str], Tokenizer]
Answer = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def answer(load: Load) -> Answer:
    """`answer(name, [(row, script), ...])` is a job of these rows, with the model that wants these scripts.

    A row is the body of a chat line; its script is text, marks included, and a model without one answers with noise.
    With `cut`, every answer is cut after so many tokens at first, and then continued.
    """

    def run(
        name: str, asked: list[tuple[dict[str, Any], str]], blocks: int = 400, sequences: int = 16, cut: int = 0
    ) -> Any:
        tokenizer, lines = load(name), []
        for index, (body, _) in enumerate(asked):
            url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            lines.append({"custom_id": str(index), "method": "POST", "url": url, "body": body})
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        rows = list(rows_from(BufferedReader(BytesIO(data)), Defaults()))  # type: ignore[arg-type]
        refused = [row for row in rows if isinstance(row, RowFailure)]
        assert not refused, refused
        vocab, backend = tokenizer.num_tokens, tokenizer._backend
        encoder, scripts = RowEncoder(tokenizer, vocab, 1 << 14), {}
        for row, (_, script) in zip(rows, asked, strict=True):
            choices = encoder.encode(row)  # type: ignore[arg-type]
            if not isinstance(choices, RowFailure):
                scripts[tuple(choices[0][0])] = backend.encode(script, add_special_tokens=False).ids

        def passed(rows: list[Any], before: Mapping[int, Done]) -> dict[int, Done]:
            source = Rows(rows, before)
            cache = KVCache([KVPool(KVSpec(KVGroup((0,), 1, 2, None), "fp32", 16), blocks)])
            engine = Engine(ScriptedModel(vocab, scripts), Scheduler(PassLimits(64, sequences), cache), Sampler())
            runner = RowRunner(engine, encoder, Answers("m", 0, tokenizer.token_text), source, source)  # type: ignore[arg-type]
            for _ in runner.passes():
                pass
            engine.close()
            return source.found

        found: dict[int, Done] = {}
        if cut:
            found = passed([replace(row, params=replace(row.params, max_tokens=cut)) for row in rows], {})  # type: ignore[type-var, union-attr]
        found |= passed([row for row in rows if not found or found[row.index].cut], found)
        return [json.loads(found[index].line)["response"]["body"] for index in range(len(asked))]

    return run
