"""Placement decisions: ranks to workers, replicas to partners, the step to restore. Pure.

No clock, no I/O: values in, values out, so that each rule is property-tested on its own.
"""
