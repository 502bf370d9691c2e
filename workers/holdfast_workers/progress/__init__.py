"""How far each rank has come: beacons in shared memory, collective counts, hang limits.

A beacon is read without the rank's help, so a rank that hangs is still seen.
"""
