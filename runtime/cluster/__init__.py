"""Jobs whose rows are computed by the workers of a Ray cluster. Ray places them, carries bytes, and says who died."""
