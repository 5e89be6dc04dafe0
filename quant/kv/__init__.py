"""Formats of the KV cache: the layout of a record, encoding and decoding, and the transform of quantized keys."""
