"""Tokenizers built from GGUF files give the ids of those that the files were made from, for each way to split text."""

import json
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from moedge.runtime.settings.errors import TokenizerError
from moedge.runtime.text import gguf_tokenizer
from moedge.runtime.text.gguf_tokenizer import write_tokenizer
from moedge.runtime.text.gguf_words import WORDS
from support.installed_transformers import needs_transformers

builds_tokenizers = needs_transformers(gguf_tokenizer.SINCE)
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KIMI = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Published tokenizers' own patterns, one after another (llama.cpp, src/llama-vocab.cpp), whether a known word is never
# split, and whether text is composed.
ORIGINALS: dict[str, tuple[tuple[str, ...], bool, bool]] = {
    "gpt-2": ((_GPT2,), False, False),
    "olmo": ((_GPT2,), False, True),
    "smollm": ((r"\p{N}", _GPT2), False, False),
    "command-r": ((r"\p{N}", _GPT2), False, True),
    "llama-bpe": ((_LLAMA3,), True, False),
    "lfm2": ((_LLAMA3,), True, False),
    "chatglm-bpe": ((_LLAMA3,), False, False),
    "glm4": ((_LLAMA3,), True, False),
    "smaug-bpe": ((_LLAMA3,), False, False),
    "tekken": ((_GPT4O.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", ""),), True, False),
    "hunyuan": ((_QWEN2,), False, False),
    "qwen2": ((_QWEN2,), False, True),
    "qwen35": (
        (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
         + _SPACES,), False, True,
    ),
    "gpt-4o": ((_GPT4O,), False, False),
    "minimax-m2": ((_GPT4O,), False, False),
    "cohere2moe": ((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O), False, False),
    "deepseek-v3": (
        (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
         r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^" "\r\n" r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
         r"| ?[\p{P}\p{S}]+[" "\r\n" r"]*|\s*[" "\r\n" r"]+|\s+(?!\S)|\s+"), False, False,
    ),
    "afmoe": (
        (r"\d{1,3}(?=(?:\d{3})*\b)",
         r"[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
         r"\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
         r"\u1100-\u11ff]+",
         r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
         r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"), False, False,
    ),
    "deepseek-coder": (("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"), False, False),
    "kimi-k2": ((_KIMI,), False, False),
    "bailingmoe2": (
        (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",),
        False, False,
    ),
    "seed-coder": (
        ("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n" r"\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}" "\r\n]+|"
         r"\s*[" "\r\n" r"]+|\s+(?!\S)|\s+",), False, False,
    ),
    "exaone-moe": (
        (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
         r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",), False, False,
    ),
    "minicpm5": ((r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), True, False),
    "laguna": ((r"[^\n]+|[\n]+", _QWEN2), False, False),
}  # fmt: skip
CONTROL, ADDED = ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), "<think>"
PIECES = [
    "Hello", " there", "I'll", "DON'T", "he's", "'Re", "camelCaseWord", "XMLHttp", "naïve", "cafe\u0301",
    "e\u0301\u0302", "Größe", " Привет", "мир", "你好", "世界和平", "ひらがな", "カタカナ", "한국어", "조선", "สวัสดี",
    "हिन्दी", "العربية",
    "🦙", "👩‍👩‍👧", "🇩🇪", "☃️", "\U0001d400\U0001d41b", "ǆ", "ᾈ", "Ⅷ", "½", "٣٤٥", "1", "22", "333", "4444",
    "1234567", "3.14", "1,000,000",
    " ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", " \n ", "\u00a0", "\u3000", "def f(x):\n    return x[1]", "a/b//c",
    "!=", "===", "->", " ...", "“quoted”", "\uff0c", "\u3002", "(see", "#tag", "$5", "_x_", "`", "\\n", "http://x.y/z?q=1",
    *CONTROL, ADDED,
]  # fmt: skip


def texts(count: int) -> list[str]:
    generator = random.Random(11)
    return ["".join(generator.choices(PIECES, k=generator.randint(1, 12))) for _ in range(count)]


def original(name: str) -> Tokenizer:
    """A tokenizer that was trained with a type's pattern; the last of its merges were forgotten, their tokens not."""
    patterns, whole, composed = ORIGINALS[name]
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in patterns]
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_alone])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator(texts(3000), trainer)
    model = tokenizer.model
    state = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(each) for each in state["merges"]]
    tokenizer.model = type(model)(vocab=state["vocab"], merges=merges[:-80], ignore_merges=whole)
    if composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in CONTROL])
    tokenizer.add_tokens([AddedToken(ADDED, normalized=False)])
    return tokenizer


def write(tokenizer: Tokenizer, name: str, path: Path) -> Path:
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in CONTROL else 4 if token == ADDED else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_eos_token_id(vocabulary["<|endoftext|>"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@builds_tokenizers
@pytest.mark.sample("qwen35")
@pytest.mark.parametrize("name", ORIGINALS)
def test_ids_are_those_of_the_tokenizer_that_the_file_was_made_from(name: str, tmp_path: Path) -> None:
    wanted = original(name)
    write_tokenizer(write(wanted, name, tmp_path / "model.gguf"), tmp_path)
    found = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    differing = [text for text in texts(2000) if found.encode(text).ids != wanted.encode(text).ids]
    assert not differing


def test_every_way_to_split_has_an_original() -> None:
    compared = {WORDS[name] for name in ORIGINALS}
    assert {words for name, words in WORDS.items() if name != "deepseek-llm"} == compared


@builds_tokenizers
def test_a_way_to_split_that_is_not_known_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = write(original("gpt-2"), "viking", tmp_path / "model.gguf")
    with pytest.raises(
        TokenizerError, match=r"tokenizer\.ggml\.pre is 'viking', a way to split text that is not known"
    ):
        write_tokenizer(path, tmp_path)


@builds_tokenizers
def test_ids_of_gemma_4_are_those_of_the_tokenizer_that_the_file_was_made_from(tmp_path: Path) -> None:
    """Merges over text whose spaces are marked, bytes where no piece fits; neither words nor scores decide."""
    base = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|turn>", "<turn|>"]
    wanted = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    wanted.normalizer = normalizers.Replace(" ", "\u2581")
    wanted.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=base, limit_alphabet=60, show_progress=False)
    wanted.train_from_iterator(texts(2000), trainer)
    model = json.loads(wanted.to_str())["model"]
    merges = [tuple(each) for each in model["merges"]]
    wanted.model = models.BPE(model["vocab"], merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    control = [each for each in base if not each.startswith("<0x")]
    wanted.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in control])
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    writer.add_token_scores([-1000.0] * len(tokens))
    writer.add_token_types([3 if each in control else 6 if each.startswith("<0x") else 1 for each in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_space_prefix(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    write_tokenizer(tmp_path / "model.gguf", tmp_path)
    found = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    strings = [text.replace("<|im_start|>", "<|turn>") for text in texts(2000)]
    differing = [
        text for text in strings
        if found.encode(text, add_special_tokens=False).ids != wanted.encode(text, add_special_tokens=False).ids
    ]  # fmt: skip
    assert not differing
