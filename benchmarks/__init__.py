"""Programs that measure Holdfast against alternatives or a lower bound, both in one run.

A program prints a JSON object as its last line if started with `--json`.
"""
