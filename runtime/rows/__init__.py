"""The contract of rows: strict JSON in, checked and typed; answers and failures as JSON out. Torch-free."""
