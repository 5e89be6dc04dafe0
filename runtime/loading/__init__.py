"""Builds an engine in memory from a checkpoint or a store and a plan."""
