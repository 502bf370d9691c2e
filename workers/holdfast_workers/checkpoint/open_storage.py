"""Maps an address to the storage behind it: a folder of a file system, or a bucket.

Opening connects to nothing and creates nothing; an unreachable storage shows at its first use.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.storage import Storage, local_folder, uri_fault
from holdfast_workers.protocol.processes import StorageOptions


def open_storage(uri: str, options: StorageOptions | None = None) -> Storage:
    """The storage rooted at `uri`: an absolute path, `file:///path` or `s3://bucket/prefix`.

    Raises ValueError for any other URI.
    """
    fault = uri_fault(uri)
    if fault is not None:
        raise ValueError(f"{uri}: {fault}")
    parts = urlsplit(uri)
    if parts.scheme == "s3":
        # Late: botocore is heavy, and processes that only use a file system never load it.
        from holdfast_workers.checkpoint.s3 import S3Storage

        return S3Storage.connect(parts.netloc, parts.path.strip("/"), options or StorageOptions())
    folder = local_folder(uri)
    assert folder is not None  # only a bucket has none
    return LocalStorage(folder)
