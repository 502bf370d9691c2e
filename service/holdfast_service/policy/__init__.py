"""The pure recovery policy: fault causes, the decision ladder, quarantine and save intervals.

Every fault gets exactly one decision with a named reason.
"""
