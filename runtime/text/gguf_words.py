"""How byte-level tokenizers split text into words before they merge, by the name that GGUF files have for it.

Patterns are those of the tokenizers' own tokenizer.json files (llama.cpp, src/llama-vocab.cpp and src/unicode.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Words:
    """What each of `patterns` matches is a word, or what `then_gpt2` splits by GPT-2's pattern.

    A `whole` word that is in the vocabulary is one token, whatever its merges. Text is `composed` (NFC) before.
    """

    patterns: tuple[str, ...] = ()
    then_gpt2: bool = False
    whole: bool = False
    composed: bool = False


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PATHS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


def _by_case(upper: str, lower: str, ending: str, numbers: str, rest: str) -> str:
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}|{numbers}|{rest}"


_LLAMA3 = Words((rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_OTHERS}",))
_QWEN2 = Words((rf"{_ENDINGS}|{_LETTERS}|\p{{N}}|{_OTHERS}",))
_GPT4O = Words((_by_case(_UPPER, _LOWER, f"{_ENDINGS}?", r"\p{N}{1,3}", _PATHS),))
_UPPER_APART, _LOWER_APART = (f"{each[:-1]}&&[^\\p{{Han}}]]" for each in (_UPPER, _LOWER))
_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
# As llama.cpp has it.
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_AFTER_SIGN = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK3 = Words((r"\p{N}{1,3}", _KANA, _AFTER_SIGN))
_GPT2 = Words(then_gpt2=True)
_DIGITS = Words((r"\p{N}",), then_gpt2=True)
# Three at a time from the end.
_THOUSANDS = r"\d{1,3}(?=(?:\d{3})*\b)"
# Letters that are small or large, as far as Unicode had them then.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
WORDS: Mapping[str, Words] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "jais", "trillion", "exaone4", "mellum", "gigachat"), _GPT2),
    "olmo": replace(_GPT2, composed=True),
    **dict.fromkeys(("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS),
    "command-r": replace(_DIGITS, composed=True),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "glm4", "glm5"),
        replace(_LLAMA3, whole=True),
    ),
    "tekken": Words((_by_case(_UPPER, _LOWER, "", r"\p{N}", _PATHS),), whole=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open", "grok-2", "kormo"), _QWEN2),
    **dict.fromkeys(("qwen2", "megrez"), replace(_QWEN2, composed=True)),
    "qwen35": Words(
        (rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
         rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",),
        composed=True,
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), Words((_THOUSANDS, *_GPT4O.patterns))),
    "afmoe": Words((_THOUSANDS, _ASIAN, _AFTER_SIGN)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "deepseek-llm": Words(
        (r"[\r\n]", rf"\s?[{_CASED}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$",
         "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"),
    ),
    "deepseek-coder": Words(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"),
    ),
    "kimi-k2": Words(
        (r"[\p{Han}]+|" + _by_case(_UPPER_APART, _LOWER_APART, f"{_ENDINGS}?", r"\p{N}{1,3}", _OTHERS),),
    ),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2"),
        Words((r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
               r"|\s*[\r\n]|\s+(?!\S)|\s+",)),
    ),
    "seed-coder": Words((rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    "exaone-moe": Words(
        (rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
         r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",),
    ),
    "minicpm5": Words((r"\p{N}{1,3}", rf"{_ENDINGS}|{_LETTERS}|\p{{N}}+|{_OTHERS}"), whole=True),
    "laguna": Words((r"[^\n]+|[\n]+", *_QWEN2.patterns)),
}  # fmt: skip
