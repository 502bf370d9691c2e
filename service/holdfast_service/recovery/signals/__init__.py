"""Handlers of signals and agent reports. They apply to the present world; stale ones are ignored.

A handler selects what is of the present world and passes it to the room that it concerns. It
returns the faults that the input shows and never judges them. `takeover.py` starts the first
attempt, or adopts the attempt of a former supervisor.
"""
