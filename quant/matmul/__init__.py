"""Matmuls of activations with packed matrices: on one thread, on a worker pool, or by a GPU kernel."""
