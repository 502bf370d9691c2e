"""The control plane: jobs, store, reconciler, supervisor, recovery policy. Never imports torch."""
