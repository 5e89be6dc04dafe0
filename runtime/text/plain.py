"""Text through a tokenizer's pipeline without its added tokens: the one way that can yield no control token."""

from tokenizers import Tokenizer


def plain_ids(backend: Tokenizer, text: str) -> list[int]:
    """The ids the model part of `backend` gives `text`, in which no added token is recognized."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    words = [text]
    if backend.pre_tokenizer is not None:
        words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return [token.id for word in words for token in backend.model.tokenize(word)]
