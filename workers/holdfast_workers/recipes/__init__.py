"""Built-in training programs, and the lookup of a program by its name."""
