"""Measures which suites catch a defect: seeded mutations of the product, each against a suite.

    python -m tests.mutation --list
    python -m tests.mutation --suite affected --json /tmp/mutations.jsonl

A mutation is written into the checkout and taken back, so nobody may edit, test or commit there
meanwhile: a commit would contain the mutation. Where others work, use a clone with its own `.venv`.
The product must be committed; commit the tests too, or `affected` also takes those that differ. A
killed run (SIGKILL) leaves its mutation behind: `git diff` shows it, and the next run refuses to
start. A test that fails without any mutation counts as a catch: the table names it.

`mutants`, `selection`, `verdicts` and `tables` are pure; `rooms` reads the product; `trials` writes
files and runs the suites.
"""
