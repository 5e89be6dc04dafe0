"""Quantization: weight and KV cache formats, packed matrices, and matmuls with them.

Knows no files, tiers, layers or models.
"""
