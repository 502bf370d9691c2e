"""The shell around the recovery core: feeds it inputs and carries out its effects.

One supervisor serves one job. It owns soft state only; a restarted supervisor recovers the rest
from the agents.
"""
