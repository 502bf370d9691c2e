"""What other programs watch of a server: whether it lives and is ready, its metrics, its traces."""
