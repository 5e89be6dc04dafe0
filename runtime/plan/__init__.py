"""What will run and what it will take, decided before a weight is read. Torch-free.

A `PlanRequest` says what is asked. Its `SearchSpace` makes every `Candidate` that the settings leave open; a
`CostModel` gives seconds; `solve` takes the best and returns a `PlanResult`.
"""
