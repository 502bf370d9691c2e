"""Programs that agents start as processes: the zygote, the saver, the rendezvous store."""
