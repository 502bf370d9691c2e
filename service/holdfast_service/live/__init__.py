"""Everybody who watches is told what changes. See :mod:`holdfast_service.live.hub`."""
