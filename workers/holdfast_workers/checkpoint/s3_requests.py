"""Requests to one bucket: with deadlines, tried again where that can help, errors in our words.

Growing pauses with jitter lie between attempts, bounded in number and in time. What cannot be
mended by trying again (credentials, permissions, a missing object) is raised at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import stamina
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.exceptions import ConnectionError as NoConnection
from botocore.parsers import ResponseParserError
from botocore.session import Session

from holdfast_workers.checkpoint.storage import (
    ObjectExists,
    ObjectMissing,
    StorageDenied,
    StorageError,
    StorageOptions,
    StorageUnavailable,
)

T = TypeVar("T")

DEFAULT_REGION = "us-east-1"
_WAIT_INITIAL_S = 0.1
_WAIT_MAX_S = 10.0
_READ_BYTES = 256 * 1024
_PASSING = ("SlowDown", "RequestTimeout", "ConditionalRequestConflict", "NoSuchBucket")
_MISSING = ("NoSuchKey", "NoSuchUpload", "404")
_DENIED_STATUS = (401, 403)
_PASSING_STATUS = (408, 409, 429)
_MOVED_STATUS = (301, 307)
_REMEDY = (
    "the credentials must allow to list, read, write and delete there; they come from the secret "
    "named in checkpoint.remote.secret, or else from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
    "in the environment of the server and of all nodes"
)


class Bucket:
    """Thread-safe. `key` in what follows is an object's full key."""

    def __init__(self, name: str, options: StorageOptions) -> None:
        self.name = name
        self.options = options
        self._client = _client(options)

    def where(self, key: str) -> str:
        return f"s3://{self.name}/{key}"

    def ask(
        self,
        operation: str,
        key: str,
        *,
        field: str | None = None,
        attempts: int | None = None,
        **fields: Any,
    ) -> Any:
        """One request about an object, tried `attempts` times: its answer, or a field of it that
        must be there. Raises what the module says."""

        def once() -> Any:
            answer = getattr(self._client, operation)(Bucket=self.name, Key=key, **fields)
            return answer if field is None else _need(answer, field)

        return self._retried(key, once, attempts)

    def send(
        self,
        operation: str,
        key: str,
        content: memoryview,
        wanted: Callable[[], bool] = lambda: True,
        *,
        field: str | None = None,
        **fields: Any,
    ) -> Any:
        """As `ask`, with a body; not tried again once it is not `wanted` any more."""

        def once() -> Any:
            if not wanted():
                raise StorageError(self.where(key), "given up")
            body = _Body(content, time.monotonic() + self.options.part_timeout_s)
            send = getattr(self._client, operation)
            answer = send(Bucket=self.name, Key=key, Body=body, **fields)
            return answer if field is None else _need(answer, field)

        return self._retried(key, once)

    def get_range(self, key: str, start: int, buffer: memoryview) -> tuple[int, int]:
        """Bytes from `start` on into `buffer`; how many there were, and the object's size."""

        def once() -> tuple[int, int]:
            deadline = time.monotonic() + self.options.part_timeout_s
            asked = f"bytes={start}-{start + len(buffer) - 1}"
            try:
                answer = self._client.get_object(Bucket=self.name, Key=key, Range=asked)
            except ClientError as error:
                if _status(error) == 416:  # an empty object has no range
                    return 0, start
                raise
            with contextlib.closing(answer["Body"]) as body:
                size = int(_need(answer, "ContentRange").rpartition("/")[2])
                return _fill(body, buffer[: size - start], deadline, self.where(key)), size

        return self._retried(key, once)

    def pages(self, operation: str, items: str, prefix: str) -> Iterator[dict[str, Any]]:
        """All entries of a listing, page by page."""
        cursor: dict[str, Any] = {}
        while True:
            page = self._page(operation, prefix, cursor)
            yield from page.get(items, ())
            if not page.get("IsTruncated"):
                return
            following = {name.removeprefix("Next"): page[name] for name in page if "Next" in name}
            cursor = {name: value for name, value in following.items() if value}

    def delete_keys(self, keys: list[str]) -> None:
        """Remove up to 1000 objects by one request."""
        objects = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        answer = self._retried(
            keys[0], lambda: self._client.delete_objects(Bucket=self.name, Delete=objects)
        )
        for failed in answer.get("Errors", ()):
            raise StorageUnavailable(self.where(failed["Key"]), f"not deleted: {failed['Code']}")

    def _page(self, operation: str, prefix: str, cursor: dict[str, Any]) -> Any:
        def once() -> Any:
            page = getattr(self._client, operation)(Bucket=self.name, Prefix=prefix, **cursor)
            _need(page, "IsTruncated")  # what was cut short must not be taken for an empty listing
            return page

        return self._retried(prefix, once)

    def _retried(self, key: str, once: Callable[[], T], attempts: int | None = None) -> T:
        retrying = stamina.retry_context(
            on=StorageUnavailable,
            attempts=attempts or self.options.attempts,
            timeout=self.options.patience_s,
            wait_initial=_WAIT_INITIAL_S,
            wait_max=_WAIT_MAX_S,
            wait_jitter=_WAIT_INITIAL_S,
        )
        for attempt in retrying:
            with attempt, _translated(self.where(key)):
                return once()
        raise AssertionError("a retried block returns or raises")


class _Body:
    """What is sent, in small pieces: each has the socket's time-out, all together a deadline."""

    def __init__(self, content: memoryview, deadline: float) -> None:
        self._content = content
        self._deadline = deadline
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        if time.monotonic() > self._deadline:
            raise TimeoutError("it takes too long to send")
        until = len(self._content) if size < 0 else self._at + size
        piece = bytes(self._content[self._at : until])
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._content))[whence]
        return self._at

    def tell(self) -> int:
        return self._at


class _CutShort(Exception):
    """An answer lacks what every whole one has."""


def _need(answer: dict[str, Any], field: str) -> Any:
    if field not in answer:
        raise _CutShort(f"an answer without {field}: cut short")
    return answer[field]


def _fill(body: Any, buffer: memoryview, deadline: float, where: str) -> int:
    filled = 0
    while filled < len(buffer):
        piece = body.read(min(_READ_BYTES, len(buffer) - filled))
        if not piece:
            raise StorageUnavailable(where, f"cut short after {filled} of {len(buffer)} bytes")
        buffer[filled : filled + len(piece)] = piece
        filled += len(piece)
        if time.monotonic() > deadline:
            raise StorageUnavailable(where, f"only {filled} bytes came in time")
    return filled


def _client(options: StorageOptions) -> Any:
    session = Session()
    given = options.credentials
    if given is not None:
        session.set_credentials(
            given["access_key_id"], given["secret_access_key"], given.get("session_token")
        )
    region = options.region or session.get_config_variable("region") or DEFAULT_REGION
    config = Config(
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.read_timeout_s,
        retries={"total_max_attempts": 1, "mode": "standard"},  # ours are around it
        max_pool_connections=options.in_flight + 1,
        # Services other than AWS's own seldom have a host name for each bucket.
        s3={"addressing_style": "path" if options.endpoint else "auto"},
        request_checksum_calculation="when_required",  # not all of them know the newer checksums
        response_checksum_validation="when_required",
    )
    return session.create_client(
        "s3", region_name=region, endpoint_url=options.endpoint, config=config
    )


_PASSING_ERRORS = (
    HTTPClientError,
    NoConnection,
    IncompleteReadError,
    ResponseParserError,
    OSError,
    _CutShort,
)


@contextlib.contextmanager
def _translated(where: str) -> Iterator[None]:
    try:
        yield
    except ClientError as error:
        raise _told(where, error) from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise StorageDenied(where, f"{error}: {_REMEDY}") from error
    except _PASSING_ERRORS as error:
        raise StorageUnavailable(where, f"{type(error).__name__}: {error}") from error
    except BotoCoreError as error:
        raise StorageError(where, f"{type(error).__name__}: {error}") from error


def _told(where: str, error: ClientError) -> StorageError:
    status, code = _status(error), error.response["Error"].get("Code", "")
    why = f"{code} ({status}): {error.response['Error'].get('Message', '')}"
    if code == "NoSuchBucket":  # it may come back: whether it ever was, is asked at submission
        why += ": create the bucket, or correct checkpoint.remote.uri or .endpoint"
    if code in _MISSING:
        return ObjectMissing(where)
    if status == 412:
        return ObjectExists(where)
    if code in _PASSING or status >= 500 or status in _PASSING_STATUS:
        return StorageUnavailable(where, why)
    if status in _DENIED_STATUS:
        return StorageDenied(where, f"{why}: {_REMEDY}")
    if status in _MOVED_STATUS:
        return StorageDenied(where, f"{why}: set checkpoint.remote.region to the bucket's region")
    return StorageError(where, why)


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
