"""Two small tokenizers of the two families that matter, each saved as a model folder."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from moedge.runtime.text import tokenizer as tokenizer_module

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it sleeps.",
    "A user writes a message; an assistant answers it. user assistant system im start end think",
    "Größe, naïve café, über — “quotes” … 東京 日本語 テスト, emoji 🙂 and 👩‍🚀.",
    "def main():\n    return 0\n\n\n# comment\tend",
] * 4

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False), "    "])
    bos = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    space = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence(space)
    trained.train_from_iterator(CORPUS[:2], trainers.BpeTrainer(vocab_size=200, show_progress=False))
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    vocab = {name: i for i, name in enumerate([*names, *words])}
    merges = [
        (word[:cut], word[cut:])
        for word in words
        for cut in range(1, len(word))
        if word[:cut] in vocab and word[cut:] in vocab
    ]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(space)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names[:5]])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def save(backend: Tokenizer, folder: Path, **settings: Any) -> Path:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=backend, **settings).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("tokenizers")
    return {
        "byte_level": save(
            byte_level(),
            base / "byte_level",
            bos_token="<|endoftext|>",
            eos_token="<|im_end|>",
            chat_template=CHATML,
        ),
        "metaspace": save(
            metaspace(),
            base / "metaspace",
            bos_token="<s>",
            eos_token="</s>",
            unk_token="<unk>",
            chat_template=INSTRUCT,
        ),
    }


@pytest.fixture(scope="session", params=["byte_level", "metaspace"])
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Iterator[tokenizer_module.Tokenizer]:
    with tokenizer_module.Tokenizer.load(folder, now=datetime(2026, 1, 2)) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def stock(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


@pytest.fixture
def backend(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
