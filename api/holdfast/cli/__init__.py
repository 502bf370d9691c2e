"""The `holdfast` command: results go to stdout, progress and errors to stderr. `main` lists the
commands. Flat in this room are those that ask a server; `common` and `exit_codes` serve all rooms.
"""
