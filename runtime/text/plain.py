"""Text through a tokenizer's pipeline without its added tokens: the one way that can yield no control token."""

from tokenizers import Tokenizer

from .bounded import bounded_encoding


class PlainText:
    """The pipeline of `backend` without its added tokens and without what it puts around a text."""

    def __init__(self, backend: Tokenizer) -> None:
        self._pipeline = Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._pipeline.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._pipeline.pre_tokenizer = backend.pre_tokenizer

    def ids(self, text: str) -> list[int]:
        """The ids the model part gives `text`, in which no added token is recognized."""
        return list(bounded_encoding(self._pipeline, text).ids)
