"""Storage in a bucket of any S3 service.

A failed upload is aborted. An upload whose process was killed shows in `folders`, and
`delete_broken` and `delete_all` abort it. The client is botocore: it starts no thread by itself,
and unlike clients that hide multipart uploads it can list and abort them. `put_new` needs a
service that supports `If-None-Match`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from holdfast_workers.checkpoint.s3_requests import Bucket
from holdfast_workers.checkpoint.s3_transfers import Download, Upload
from holdfast_workers.checkpoint.storage import (
    ObjectFacts,
    ObjectMissing,
    ObjectReader,
    ObjectWriter,
)
from holdfast_workers.protocol.processes import StorageOptions

DELETE_BATCH_KEYS = 1000
_READ_BYTES = 1024 * 1024


class S3Storage:
    """A `Storage` below a prefix of a bucket. Thread-safe."""

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._root = f"{prefix}/" if prefix else ""

    @classmethod
    def connect(cls, bucket: str, prefix: str, options: StorageOptions) -> S3Storage:
        """The storage; sends no request yet."""
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
        return {name: facts.nbytes for name, facts in self.listing().items()}

    def listing(self, prefix: str = "") -> dict[str, ObjectFacts]:
        objects = self._bucket.pages("list_objects_v2", "Contents", self._root + prefix)
        return {
            item["Key"].removeprefix(self._root): ObjectFacts(
                item["Size"], str(item.get("ETag", item.get("LastModified")))
            )
            for item in objects
        }

    def folders(self) -> list[str]:
        uploads = (upload["Key"].removeprefix(self._root) for upload in self._uploads())
        names = [*self.objects(), *uploads]
        return sorted({name.partition("/")[0] for name in names if "/" in name})

    def delete(self, name: str) -> None:
        self._bucket.request("delete_object", self._root + name)

    def delete_broken(self) -> None:
        for upload in list(self._uploads()):
            with contextlib.suppress(ObjectMissing):  # it has just been completed or aborted
                self._bucket.request(
                    "abort_multipart_upload", upload["Key"], UploadId=upload["UploadId"]
                )

    def delete_all(self) -> None:
        self.delete_broken()
        keys = [self._root + name for name in self.objects()]
        for start in range(0, len(keys), DELETE_BATCH_KEYS):
            self._bucket.delete_keys(keys[start : start + DELETE_BATCH_KEYS])

    def _uploads(self) -> Iterator[dict[str, Any]]:
        """Multipart uploads that are in progress or were interrupted."""
        return self._bucket.pages("list_multipart_uploads", "Uploads", self._root)
