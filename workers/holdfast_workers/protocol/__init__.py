"""The protocol between supervisor, agents and workers: message types, their codec, step leases.

Every message is a frozen dataclass; `codec.py` is the only way between processes that may run
different versions. Nothing here acts.
"""
