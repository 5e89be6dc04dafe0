"""transformers' model definitions, driven through four seams: attention, experts, weights and norms (docs/internals.md)."""
