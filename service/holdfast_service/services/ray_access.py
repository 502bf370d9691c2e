"""Whether a job's ranks may be clients of the Ray cluster: checked when the job is submitted.

A client of Ray may do what the cluster's token allows. On the embedded cluster that is nothing new:
ranks run as the user whose file the token is, on the machine where all of the cluster is.
"""

from __future__ import annotations

from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.settings import Settings
from holdfast_workers.spec import SpecFault


def find_fault(spec: JobSpec, settings: Settings) -> SpecFault | None:
    """The fault of a job whose ranks would use Ray, or None. Pure."""
    if spec.ray_run.datasets is None or spec.ray_train is None:
        return None
    allowed = settings.ranks_may_use_ray
    if allowed or (allowed is None and settings.ray_address is None):
        return None
    return SpecFault(
        path="ray_run.datasets",
        message="this server does not let ranks use its Ray cluster, which Ray datasets need: ask "
        "its operator for HOLDFAST_RANKS_MAY_USE_RAY=true (--ranks-may-use-ray), or read the data "
        "in the function, with a DataLoader and prepare_data_loader",
    )
