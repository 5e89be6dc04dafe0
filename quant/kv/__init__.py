"""Keys and values in 8 or 4 bits: the layout of a block, its codec, and the transform of keys before it."""
