"""A worker process: joins attempts, loads its state, trains, and leaves an attempt when fenced."""
