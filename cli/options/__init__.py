"""What can be typed: options and their checks, defaults from files and the environment, the process's setup."""
