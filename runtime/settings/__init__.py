"""Settings, budgets of memory and disk, and the errors that refuse them."""
