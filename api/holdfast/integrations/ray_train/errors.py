"""The errors of this plug-in; each says what to do."""

from __future__ import annotations

from holdfast.errors import HoldfastError


class RayTrainError(HoldfastError, code="ray_train"):
    """Root of the errors of this plug-in."""


class UnsupportedRay(RayTrainError, code="unsupported_ray"):
    """The installed Ray is missing, or outside of the supported range."""


class NotServed(RayTrainError, code="not_served"):
    """An option or call of Ray Train that Holdfast does not serve."""


class FunctionUnusable(RayTrainError, code="unusable_function"):
    """The training function, or what it is to be called with, cannot be used."""


class StorageUnusable(RayTrainError, code="unusable_storage"):
    """The folder of the run cannot be used."""


class ClusterUnusable(RayTrainError, code="unusable_cluster"):
    """The Ray cluster cannot be used by a rank, or has no room to read its datasets."""


class ReportFailed(RayTrainError, code="report_failed"):
    """A rank could not save its part of a reported checkpoint."""
