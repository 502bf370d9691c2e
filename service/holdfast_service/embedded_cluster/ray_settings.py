"""Settings of the Ray processes of every cluster that Holdfast starts: environment variables.

Pure. Ray reads them once, on import: they are set for new processes, or before the import.
"""

from __future__ import annotations

from pathlib import Path

OBJECT_STORE_BYTES = 80 * 2**20  # Holdfast moves no state through Ray's object store
CLUSTER_SETTINGS = {
    "RAY_health_check_initial_delay_ms": "2000",
    # The default of ten reports a second wastes a small machine's CPU on constant values.
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_enable_metrics_collection": "0",
    # By default each raylet checks five to ten times a second for garbage, idle workers and
    # transfers of objects, and writes a file of statistics every ten seconds.
    "RAY_raylet_check_gc_period_milliseconds": "1000",
    "RAY_kill_idle_workers_interval_ms": "1000",
    "RAY_object_manager_timer_freq_ms": "1000",
    "RAY_debug_dump_period_milliseconds": "0",
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_memory_monitor_refresh_ms": "1000",
    # Ray would run workers at niceness 15; training must not be slowed down.
    "RAY_worker_niceness": "0",
    # Prestarted idle workers would occupy two cores for seconds.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}
HEAD_MAY_BE_AWAY = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(7 * 86400)}
"""Ray's setting for the time after which it ends every process that has missed the GCS; by default
60 s."""


def token_variables(token_path: Path) -> dict[str, str]:
    """Variables of every process that talks to a cluster whose token is in this file."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_path)}


def node_health(period_s: float, failures: int) -> dict[str, str]:
    """Ray settings: a node is dead after `failures` unanswered checks in a row, `period_s` apart.

    Each check waits `period_s` for its answer.
    """
    period_ms = str(round(period_s * 1000))
    return {
        "RAY_health_check_period_ms": period_ms,
        "RAY_health_check_timeout_ms": period_ms,
        "RAY_health_check_failure_threshold": str(failures),
    }
