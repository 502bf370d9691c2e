"""Built-in training programs, and how a program is found by its name."""
