"""The paged KV cache: which block holds which tokens, and the bytes of the blocks.

Knows sequences only as block tables; scheduling and attention live elsewhere.
"""
