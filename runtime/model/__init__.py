"""transformers' model definitions, driven through three seams: attention, experts and weights. See docs/design.md."""
