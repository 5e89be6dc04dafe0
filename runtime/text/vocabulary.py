"""The strings of a tokenizer's tokens, and which of them decoding leaves out."""

from tokenizers import Tokenizer


class Vocabulary:
    """Token strings by id, as the vocabulary spells them."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def token(self, token_id: int) -> str:
        """Empty for an id outside the vocabulary: a model's logits are often padded beyond it."""
        return self._backend.id_to_token(token_id) or ""
