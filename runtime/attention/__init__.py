"""Attention over the paged cache, behind one protocol. Knows chunks and blocks, not models."""
