"""Sizes of a pass over experts that memory planning counts with. Torch-free."""

# Larger groups of rows are padded to a multiple of this. Kernels made for a shape are kept for the next product of that
# shape: with every row count from 1 to 500 they took 200 MiB, with multiples of 16 a tenth, in the same time. Kernels
# for few rows cost by the row, so smaller groups stay as they are.
ROW_MULTIPLE = 16


def padded_rows(count: int) -> int:
    """Rows that an expert computes for `count` tokens."""
    return count if count < ROW_MULTIPLE else -(-count // ROW_MULTIPLE) * ROW_MULTIPLE


def most_rows(num_tokens: int, per_token: int, num_experts: int) -> int:
    """Rows that all experts of a layer compute together, at most, padding included."""
    assigned = num_tokens * per_token
    return assigned + min(num_experts, assigned) * ROW_MULTIPLE
