"""Applications: each stands on the public names of the core alone, and can be left out."""
