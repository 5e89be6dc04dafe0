"""From a checkpoint or a store and a plan to an engine in memory."""
