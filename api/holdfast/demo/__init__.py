"""`holdfast demo`: a job on a local cluster, faults on purpose, and the proof of equal bits."""
