"""Values of a machine from the kernel: of this machine, and of a machine recorded in files."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest
from tests.support.nodes.agent_config import agent_config

from holdfast_workers.agent.health_watch import XIDS_KEPT, HealthProbes, HealthWatch
from holdfast_workers.health import host
from holdfast_workers.health.findings import DiskReading


def write(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def recorded(root: Path) -> Path:
    pressure = "some avg10=0.00 avg60=31.00 avg300=4.00 total=1\n"
    pressure += "full avg10=0.00 avg60=12.50 avg300=3.00 total=1\n"
    write(root, "proc/pressure/memory", pressure)
    write(root, "proc/meminfo", "MemTotal:  1000 kB\nMemAvailable:  15 kB\nHugePages_Total: 0\n")
    write(root, "proc/sys/fs/file-nr", "9500\t0\t10000\n")
    write(root, "sys/block/sda/device/ioerr_cnt", "0x1f\n")
    write(root, "sys/block/sdb/device/ioerr_cnt", "0x1\n")
    write(root, "sys/class/net/eth0/operstate", "up\n")
    for name in (*host.BAD_PACKETS, *host.PACKETS):
        write(root, f"sys/class/net/eth0/statistics/{name}", "7\n")
    return root


def test_the_values_of_a_recorded_machine_are_read(tmp_path: Path) -> None:
    root = recorded(tmp_path)
    read = host.read_host((), root)
    assert read.stalled_share == 0.125
    assert (read.memory_available, read.memory_total) == (15 * 1024, 1000 * 1024)
    assert read.handles == (9500, 10000)
    assert read.io_errors == 32
    network = host.read_network("eth0", root)
    assert (network.up, network.errors, network.packets) == (True, 28, 14)


def test_unreadable_files_give_no_value(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "nonsense\n")
    write(tmp_path, "proc/sys/fs/file-nr", "many\n")
    write(tmp_path, "sys/block/sda/device/ioerr_cnt", "broken\n")
    read = host.read_host((), tmp_path)
    values = [read.stalled_share, read.memory_available, read.handles, read.io_errors]
    assert values == [None] * 4
    network = host.read_network("eth0", tmp_path)
    assert network.up is network.errors is network.packets is None


def test_a_missing_counter_makes_the_sum_unknown(tmp_path: Path) -> None:
    root = recorded(tmp_path)
    (root / "sys/class/net/eth0/statistics/tx_errors").unlink()
    assert host.read_network("eth0", root).errors is None


def test_a_link_that_is_down_is_detected(tmp_path: Path) -> None:
    write(tmp_path, "sys/class/net/eth0/operstate", "down\n")
    assert host.read_network("eth0", tmp_path).up is False


def test_the_values_of_this_machine_are_read(tmp_path: Path) -> None:
    folder = str(tmp_path / "yet" / "to" / "be" / "made")
    read = host.read_host((folder,))
    assert read.memory_total is not None and read.memory_available is not None
    assert 0 < read.memory_available <= read.memory_total
    assert read.handles is not None and read.handles[0] > 0
    (disk,) = read.disks
    assert isinstance(disk, DiskReading) and disk.folder == folder and 0 < disk.free <= disk.total
    loopback = host.read_network("lo")
    assert loopback.up is True
    assert loopback.packets is not None and loopback.errors is not None


def test_a_cpu_job_reads_no_device(tmp_path: Path) -> None:
    config = agent_config(
        tmp_path, memory_root=str(tmp_path / "shm"), env={"GLOO_SOCKET_IFNAME": "lo"}
    )
    probes = HealthProbes.of(config)
    assert probes.accelerators is None
    assert probes.folders == tuple(str(tmp_path / name) for name in ("shm", "cache", "remote"))
    observed, xids = probes.observe(1.0, 0)
    assert observed.devices is None and xids == ()
    assert observed.network is not None and observed.network.interface == "lo"


def test_a_disk_that_raises_an_error_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, exists = tmp_path / "data", Path.exists

    def stale(path: Path) -> bool:
        if path == folder:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", stale)
    assert host.read_host((str(folder),)).disks == ()


@pytest.mark.usefixtures("logs_on_stderr")
def test_a_failed_check_is_logged_and_the_next_check_follows(
    capfd: pytest.CaptureFixture[str],
) -> None:
    checks, again = 0, threading.Event()

    def workers() -> int:
        nonlocal checks
        checks += 1
        if checks == 1:
            raise OSError(errno.EIO, "a broken disk")
        again.set()
        return 0

    watch = HealthWatch(lambda: HealthProbes((), "", None), 0.001, workers, lambda _: None)
    watch.start()
    try:
        assert again.wait(60.0)
    finally:
        watch.stop()
    assert "a broken disk" in capfd.readouterr().err


def test_many_xids_of_programs_do_not_displace_an_xid_of_a_device() -> None:
    watch = HealthWatch(lambda: HealthProbes((), "", None), 1.0, lambda: 0, lambda _: None)
    watch.inject_xid(79)
    for _ in range(5 * XIDS_KEPT):
        watch.inject_xid(31)
    watch.check(HealthProbes((), "", None), time.monotonic())
    assert {finding.code for finding in watch.findings if finding.lost} == {79}
