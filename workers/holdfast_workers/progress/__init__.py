"""The progress of each rank: beacons in shared memory, collective counts, hang limits.

A beacon is read without the rank's help, so the progress of a hanging rank is still visible.
"""
