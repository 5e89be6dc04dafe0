"""A checkpoint by path or by its name on the hub: headers first, weights when they are needed."""
