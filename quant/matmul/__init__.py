"""Products with packed matrices on a CPU: which kernel computes one, on which threads, in which scratch."""
