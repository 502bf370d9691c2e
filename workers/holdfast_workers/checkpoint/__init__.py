"""The remote tier: sharded checkpoints in a folder, under an atomic and verified manifest."""
