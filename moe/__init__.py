"""Mixture-of-experts layers: which experts a pass needs, for which tokens, in which order they are read and computed.

Knows no model family and no sequence.
"""
