"""Decides what will run and estimates its time, before any weights are read. Torch-free.

A `PlanRequest` says what is asked. Its `SearchSpace` makes every `Candidate` that the settings leave open; a
`CostModel` gives seconds; `solve` takes the best and returns a `PlanResult`.
"""
