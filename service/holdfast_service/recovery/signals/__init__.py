"""What signals and agents report, applied to the present world; stale reports are ignored."""
