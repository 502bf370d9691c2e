"""`holdfast demo`: a job on a local cluster, injected faults, and the proof of equal bits."""
