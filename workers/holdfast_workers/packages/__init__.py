"""The Python packages that a job adds to those of its nodes."""
