"""The recovery policy: fault causes, the decision ladder, quarantine and save intervals; and how
often a server looks. Pure.

Every fault gets exactly one decision with a named reason.
"""
