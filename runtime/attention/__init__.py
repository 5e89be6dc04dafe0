"""Attention over the paged KV cache, behind one protocol. Knows chunks and blocks, not models."""
