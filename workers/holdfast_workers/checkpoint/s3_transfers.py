"""Transfers large objects to and from a bucket, in parts of one size.

A fixed number of parts is in flight. Memory is bounded by `in_flight + 1` reused buffers of
`part_bytes`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from holdfast_workers.checkpoint.s3_requests import Bucket
from holdfast_workers.checkpoint.storage import ObjectMissing, StorageError, TransientStorageError

MAX_PARTS = 10_000


class Upload:
    """Uploads one object; `commit` or `abort` ends it. An object that fits into one part is sent by
    a single request."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._bucket = bucket
        self._key = key
        self._buffer = memoryview(bytearray(bucket.options.part_bytes))
        self._filled = 0
        self._written = 0
        self._id: str | None = None
        self._wanted = True
        self._pool: ThreadPoolExecutor | None = None
        self._in_flight: deque[tuple[Future[str], memoryview]] = deque()
        self._etags: list[str] = []

    def write(self, piece: bytes | memoryview) -> int:
        rest = memoryview(piece).cast("B")
        nbytes = len(rest)
        while rest:
            if self._filled == len(self._buffer):
                self._buffer = self._send_part()
                self._filled = 0
            count = min(len(rest), len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + count] = rest[:count]
            self._filled += count
            rest = rest[count:]
        self._written += nbytes
        return nbytes

    def tell(self) -> int:
        return self._written

    def commit(self) -> None:
        """Send the rest; the object appears."""
        content = self._buffer[: self._filled]
        if self._id is None:
            self._bucket.send("put_object", self._key, content)
            return
        self._send_part()
        while self._in_flight:
            self._finish_oldest()
        parts = [{"PartNumber": n, "ETag": etag} for n, etag in enumerate(self._etags, start=1)]
        try:
            self._bucket.request(
                "complete_multipart_upload",
                self._key,
                UploadId=self._id,
                MultipartUpload={"Parts": parts},
            )
        except ObjectMissing:
            self._check_completed()
        self._id = None

    def abort(self) -> None:
        """Discard the upload. If the bucket cannot be reached, `delete_all` removes it later."""
        self._wanted = False
        self.close()
        if self._id is not None:
            with contextlib.suppress(StorageError):
                self._bucket.request(
                    "abort_multipart_upload", self._key, attempts=1, UploadId=self._id
                )

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _send_part(self) -> memoryview:
        """Start sending the buffer; return another one to fill."""
        number = len(self._etags) + len(self._in_flight) + 1
        if number > MAX_PARTS:
            limit = MAX_PARTS * self._bucket.options.part_bytes
            raise StorageError(self._bucket.uri_of(self._key), f"larger than {limit} bytes")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._bucket.options.in_flight, "s3-upload")
            self._id = self._bucket.request("create_multipart_upload", self._key, field="UploadId")
        content = self._buffer[: self._filled]
        self._in_flight.append((self._pool.submit(self._put_part, number, content), self._buffer))
        if len(self._in_flight) <= self._bucket.options.in_flight:
            return memoryview(bytearray(self._bucket.options.part_bytes))
        return self._finish_oldest()

    def _put_part(self, number: int, content: memoryview) -> str:
        etag = self._bucket.send(
            "upload_part",
            self._key,
            content,
            lambda: self._wanted,
            field="ETag",
            PartNumber=number,
            UploadId=self._id,
        )
        return str(etag)

    def _finish_oldest(self) -> memoryview:
        """Wait for the oldest part; return its buffer, which is free again."""
        part, buffer = self._in_flight.popleft()
        self._etags.append(part.result())
        return buffer

    def _check_completed(self) -> None:
        """The upload no longer exists. If the whole object exists, the upload was completed and the
        response was lost; otherwise raise TransientStorageError."""
        size = self._bucket.request("head_object", self._key, field="ContentLength")
        if size != self._written:
            raise TransientStorageError(self._bucket.uri_of(self._key), "its upload has vanished")


class Download:
    """Reads an object's bytes in order and prefetches the next parts."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._bucket = bucket
        self._key = key
        self._part_bytes = bucket.options.part_bytes
        buffer = memoryview(bytearray(self._part_bytes))
        count, self._size = bucket.get_range(key, 0, buffer)
        self._current, self._spare = buffer[:count], buffer
        self._requested_bytes = count
        self._pool: ThreadPoolExecutor | None = None
        self._in_flight: deque[tuple[Future[int], memoryview]] = deque()
        if self._requested_bytes < self._size:
            self._pool = ThreadPoolExecutor(bucket.options.in_flight, "s3-download")
            for _ in range(bucket.options.in_flight):
                self._request_next(memoryview(bytearray(self._part_bytes)))

    def readinto(self, buffer: memoryview) -> int:
        filled = 0
        while filled < len(buffer) and (self._current or self._next()):
            count = min(len(buffer) - filled, len(self._current))
            buffer[filled : filled + count] = self._current[:count]
            self._current = self._current[count:]
            filled += count
        return filled

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _next(self) -> bool:
        """Take the next part; False at the object's end."""
        self._request_next(self._spare)
        if not self._in_flight:
            return False
        part, self._spare = self._in_flight.popleft()
        self._current = self._spare[: part.result()]
        return True

    def _request_next(self, buffer: memoryview) -> None:
        start = self._requested_bytes
        count = min(self._part_bytes, self._size - start)
        if count and self._pool is not None:
            self._requested_bytes += count
            part = self._pool.submit(self._fetch, start, buffer[:count])
            self._in_flight.append((part, buffer))

    def _fetch(self, start: int, buffer: memoryview) -> int:
        return self._bucket.get_range(self._key, start, buffer)[0]
