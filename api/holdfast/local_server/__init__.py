"""`holdfast serve` as a child process, which ends with its parent, even if that is killed."""
