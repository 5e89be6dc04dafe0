"""transformers' model definitions, with four seams: attention, experts, weights and norms (docs/dev/internals.md)."""
