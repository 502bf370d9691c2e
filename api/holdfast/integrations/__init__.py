"""Plug-ins for training frameworks. Each is small, imports its framework late, and does nothing
outside of Holdfast."""
