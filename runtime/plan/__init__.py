"""What will run and what it will take, decided before a weight is read. Torch-free."""
