"""Packed weights on disk: written so that a kill costs nothing, opened only when whole. Torch-free."""
