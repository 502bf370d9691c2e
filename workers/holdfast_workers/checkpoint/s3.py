"""Checkpoints in a bucket of any S3 service.

A broken upload is aborted; one whose process was killed is seen by `folders`, and aborted by
`delete_broken` and `delete_all`. The client is botocore: it starts no thread by itself, and unlike
clients that hide multipart uploads it can list and abort them. `put_new` needs a service that
heeds `If-None-Match`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from holdfast_workers.checkpoint.s3_requests import Bucket
from holdfast_workers.checkpoint.s3_transfers import Download, Upload
from holdfast_workers.checkpoint.storage import (
    ObjectMissing,
    ObjectReader,
    ObjectWriter,
    StorageOptions,
)

DELETED_AT_ONCE = 1000
_READ_BYTES = 1024 * 1024


class S3Storage:
    """See `Storage`. May be used from several threads."""

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._root = f"{prefix}/" if prefix else ""

    @classmethod
    def connect(cls, bucket: str, prefix: str, options: StorageOptions) -> S3Storage:
        """Nothing is asked of the bucket yet."""
        return cls(Bucket(bucket, options), prefix)

    @property
    def uri(self) -> str:
        return f"s3://{self._bucket.name}/{self._prefix}".rstrip("/")

    def below(self, folder: str) -> S3Storage:
        return S3Storage(self._bucket, self._root + folder)

    @contextlib.contextmanager
    def write(self, name: str) -> Iterator[ObjectWriter]:
        upload = Upload(self._bucket, self._root + name)
        try:
            yield upload
            upload.commit()
        except BaseException:
            upload.abort()
            raise
        upload.close()

    def put_new(self, name: str, content: bytes) -> None:
        self._bucket.send("put_object", self._root + name, memoryview(content), IfNoneMatch="*")

    def read(self, name: str) -> bytes:
        content = bytearray()
        buffer = memoryview(bytearray(_READ_BYTES))
        with self.open(name) as stream:
            while count := stream.readinto(buffer):
                content += buffer[:count]
        return bytes(content)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[ObjectReader]:
        with contextlib.closing(Download(self._bucket, self._root + name)) as download:
            yield download

    def objects(self) -> dict[str, int]:
        found = self._bucket.pages("list_objects_v2", "Contents", self._root)
        return {one["Key"].removeprefix(self._root): one["Size"] for one in found}

    def folders(self) -> list[str]:
        names = [*self.objects(), *(one["Key"].removeprefix(self._root) for one in self._uploads())]
        return sorted({name.partition("/")[0] for name in names if "/" in name})

    def delete(self, name: str) -> None:
        self._bucket.ask("delete_object", self._root + name)

    def delete_broken(self) -> None:
        for one in list(self._uploads()):
            with contextlib.suppress(ObjectMissing):  # it has just been completed or aborted
                self._bucket.ask("abort_multipart_upload", one["Key"], UploadId=one["UploadId"])

    def delete_all(self) -> None:
        self.delete_broken()
        keys = [self._root + name for name in self.objects()]
        for start in range(0, len(keys), DELETED_AT_ONCE):
            self._bucket.delete_keys(keys[start : start + DELETED_AT_ONCE])

    def _uploads(self) -> Iterator[dict[str, Any]]:
        """Multipart uploads that are under way, or were broken off."""
        return self._bucket.pages("list_multipart_uploads", "Uploads", self._root)
