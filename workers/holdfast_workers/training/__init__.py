"""The step loop: the agreement that commits each step, guards, skipped windows, the rank's log.

A step is applied on every rank or on none. This package never starts processes and never touches
storage.
"""
