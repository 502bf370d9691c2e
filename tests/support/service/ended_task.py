"""A task of a preparation that has ended already."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_service.cluster.preparation_tasks import TaskEnd


@dataclass(eq=False)
class EndedTask:
    end: TaskEnd
