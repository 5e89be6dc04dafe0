"""Packed weights: made from a checkpoint, held in memory, kept in a store, streamed during passes."""
