"""Jobs whose rows are computed by the workers of a Ray cluster. Ray starts them, carries bytes, and says who died."""
