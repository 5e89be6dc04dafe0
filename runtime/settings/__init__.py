"""What a user asks for and grants: settings, budgets of memory and disk, and the errors that refuse them."""
