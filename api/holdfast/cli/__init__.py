"""The `holdfast` command: results go to stdout, progress and errors to stderr."""
