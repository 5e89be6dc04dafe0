"""Sizes of a pass over experts that memory planning counts with. Torch-free."""

# A group's rows are padded to a multiple of this. Kernels made for a shape are kept for the next product of that
# shape: with every row count from 1 to 500 they took 200 MiB, with multiples of 16 a tenth, in the same time.
ROW_MULTIPLE = 16
# Tokens that are combined at a time; bounds the temporaries to COMBINE_TOKENS * A * D elements.
COMBINE_TOKENS = 128
