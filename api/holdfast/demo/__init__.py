"""The demonstration: what a user would do, and what a bad day would do to it."""
