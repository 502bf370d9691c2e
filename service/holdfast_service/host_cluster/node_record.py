"""What is recorded of the node on this machine, in the folder `node` of its data directory."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast_service.host_cluster.certificates import CertificateFiles
from holdfast_service.host_cluster.errors import HostClusterError
from holdfast_service.host_cluster.ray_command import NodePlaces
from holdfast_workers.private_files import make_private_folder, write_private


@dataclass(frozen=True)
class HostNode:
    """A node that was started on this machine; its processes may have ended since.

    `mark`: every process of it has this in its environment. `holder`: the process of
    `holdfast cluster ... --block` that ends it; 0: there is none.
    """

    mark: str
    head: bool
    gcs: str  # HOST:PORT of the head
    name: str
    address: str
    temp_dir: str
    shm_root: str
    token: str
    holder: int
    started_at: float  # Unix seconds

    @property
    def places(self) -> NodePlaces:
        return NodePlaces(self.mark, Path(self.temp_dir), Path(self.shm_root), Path(self.token))


@dataclass(frozen=True)
class NodeFiles:
    root: Path

    @property
    def token(self) -> Path:
        return self.root / "token"

    @property
    def certificates(self) -> CertificateFiles:
        """The certificate files that `holdfast cluster up --tls` makes."""
        return CertificateFiles(self.root / "tls", self.root / "tls-authority.key")

    @property
    def log(self) -> Path:
        return self.root / "start.log"

    @property
    def record(self) -> Path:
        return self.root / "node.json"

    def make(self) -> None:
        make_private_folder(self.root)

    def read(self) -> HostNode | None:
        """Raises HostClusterError if the record is damaged."""
        try:
            return HostNode(**json.loads(self.record.read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise HostClusterError(
                f"the record {self.record} cannot be read ({error}): end the Ray processes of this "
                "machine by hand, then remove the file"
            ) from error

    def write(self, node: HostNode) -> None:
        write_private(self.record, json.dumps(asdict(node), indent=1))

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Lock the record: only one process at a time starts or ends the node. Raises
        HostClusterError."""
        self.make()
        with (self.root / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise HostClusterError(
                    "another `holdfast cluster` command is at work on this machine: wait for it"
                ) from None
            yield


def node_files(data_dir: Path) -> NodeFiles:
    return NodeFiles(data_dir.absolute() / "node")
