"""Single-device model code; parallelism is applied from outside, in `parallelize`."""
