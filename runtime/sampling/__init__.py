"""From logits to token ids: penalties, filters, one reproducible random number per token.

Knows nothing of rows, text or models; a row's tokens depend on its own logits, settings and seed alone.
"""
