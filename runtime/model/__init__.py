"""transformers' model definitions, driven through three seams: attention, experts, weights. See docs/design.md."""
