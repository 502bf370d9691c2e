"""A user's own program, run as it is: started with the environment of a rank, watched, and ended.

The *launcher* is the worker process; it starts the program as its child for each attempt. The
program may attach to it (`attach`), and then shows its steps. `program_metrics` finds the steps of
others; `program_memory` keeps their checkpoints in memory.
"""
