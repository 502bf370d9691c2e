"""The pure recovery core: values in, values out. See :mod:`holdfast_service.recovery.core`."""
