"""The data plane: node agent, zygote, workers, checkpoints, training core. Never imports Ray."""
