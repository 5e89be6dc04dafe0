"""Which experts a pass needs, in which order, for which tokens. Knows no model family and no sequence."""
