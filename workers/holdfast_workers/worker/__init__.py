"""A worker process: joins attempts, takes its state, trains, and leaves when fenced."""
