"""Programs that agents run as processes: the zygote, the saver, the rendezvous store.

A program ends with its agent, and reports its result on its control socket.
"""
