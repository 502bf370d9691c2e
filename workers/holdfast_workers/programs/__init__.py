"""A user's own program, run as it is: started with the environment of a rank, watched, and ended.

The *launcher* is the worker process; it starts the program as its child for each attempt. The
program may attach to it (`attach`): then it shows its steps, and may keep checkpoints in memory.
"""
