"""Numbers in few bits: weight formats, packed matrices and products with them.

Knows no files, places, layers or models.
"""
