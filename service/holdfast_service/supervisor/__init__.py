"""The shell around the recovery core: feeds it signals and carries out its effects.

One supervisor serves one job. It owns soft state only; a restarted one learns the rest from agents.
"""
