"""The errors of this plug-in; each says what to do."""

from __future__ import annotations

from holdfast.errors import HoldfastError


class RayTrainError(HoldfastError):
    """Root of the errors of this plug-in."""

    code = "ray_train"


class UnsupportedRay(RayTrainError):
    """The installed Ray is missing, or outside of the supported range."""

    code = "unsupported_ray"


class NotServed(RayTrainError):
    """An option or call of Ray Train that Holdfast does not serve."""

    code = "not_served"


class FunctionUnusable(RayTrainError):
    """The training function, or what it is to be called with, cannot be used."""

    code = "unusable_function"


class StorageUnusable(RayTrainError):
    """The folder of the run cannot be used."""

    code = "unusable_storage"


class ClusterUnusable(RayTrainError):
    """The Ray cluster cannot be used by a rank, or has no room to read its datasets."""

    code = "unusable_cluster"


class ReportFailed(RayTrainError):
    """A rank could not save its part of a reported checkpoint."""

    code = "report_failed"
