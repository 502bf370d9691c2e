"""The error of this room."""

from __future__ import annotations


class HostClusterError(Exception):
    """This machine cannot start, join or leave a cluster; says why and what to do."""
