"""Programs that measure Holdfast against something else, both sides in one run."""
