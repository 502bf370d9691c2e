"""Requests to one bucket, with deadlines and retries; raises storage errors.

Attempts are separated by growing pauses with jitter, and bounded in number and in time. Errors that
a retry cannot mend (credentials, permissions, a missing object) are raised at once. No error
repeats what a reply contains: the service may be another one than it seems.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import stamina
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
    SSLError,
)
from botocore.exceptions import ConnectionError as NoConnection
from botocore.parsers import ResponseParserError
from botocore.session import Session

from holdfast_workers.checkpoint.s3_endpoint import local_address
from holdfast_workers.checkpoint.storage import (
    ObjectExists,
    ObjectMissing,
    StorageDenied,
    StorageError,
    TransientStorageError,
)
from holdfast_workers.protocol.processes import StorageOptions

T = TypeVar("T")

DEFAULT_REGION = "us-east-1"
_WAIT_INITIAL_S = 0.1
_WAIT_MAX_S = 10.0
_READ_BYTES = 256 * 1024
_TRANSIENT = ("SlowDown", "RequestTimeout", "ConditionalRequestConflict", "NoSuchBucket")
_MISSING = ("NoSuchKey", "NoSuchUpload", "404")
_DENIED_STATUS = (401, 403)
_TRANSIENT_STATUS = (408, 409, 429)
_MOVED_STATUS = (301, 307)
_NAMED_CODES = frozenset(
    {
        *("AccessDenied", "AuthorizationHeaderMalformed", "ConditionalRequestConflict"),
        *("EntityTooLarge", "ExpiredToken", "InternalError", "InvalidAccessKeyId"),
        *("InvalidBucketName", "InvalidRequest", "InvalidToken", "MethodNotAllowed"),
        *("NoSuchBucket", "NotImplemented", "PermanentRedirect", "QuotaExceeded"),
        *("RequestTimeTooSkewed", "RequestTimeout", "ServiceUnavailable"),
        *("SignatureDoesNotMatch", "SlowDown"),
    }
)
"""Codes of S3 errors that messages name; other codes are words of an unknown service."""
_DESCRIBED = (ConnectTimeoutError, EndpointConnectionError, ReadTimeoutError, SSLError)
"""Errors whose text is that of the client alone."""
_REMEDY = (
    "the credentials must allow to list and read there, and for checkpoints to write and delete; "
    "they come from the secret that the spec names, or, on AWS, from AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY in the environment of the server and of all nodes"
)


class Bucket:
    """Sends requests to one bucket. Thread-safe. A `key` is always an object's full key."""

    def __init__(self, name: str, options: StorageOptions) -> None:
        self.name = name
        self.options = options
        self._client = _client(options)

    def uri_of(self, key: str) -> str:
        return f"s3://{self.name}/{key}"

    def request(
        self,
        operation: str,
        key: str,
        *,
        field: str | None = None,
        attempts: int | None = None,
        **fields: Any,
    ) -> Any:
        """Send a request about one object, at most `attempts` times.

        Returns the response, or its `field`, which must be present. Raises the errors of `storage`.
        """

        def send_request() -> Any:
            response = getattr(self._client, operation)(Bucket=self.name, Key=key, **fields)
            return response if field is None else _required(response, field)

        return self._retried(key, send_request, attempts)

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
        """Send a request like `request`, with a body. There is no further attempt once `wanted`
        returns False."""

        def send_request() -> Any:
            if not wanted():
                raise StorageError(self.uri_of(key), "the upload was aborted")
            body = _Body(content, time.monotonic() + self.options.part_timeout_s)
            send = getattr(self._client, operation)
            response = send(Bucket=self.name, Key=key, Body=body, **fields)
            return response if field is None else _required(response, field)

        return self._retried(key, send_request)

    def get_range(self, key: str, start: int, buffer: memoryview) -> tuple[int, int]:
        """Fill `buffer` from offset `start` on; return the bytes filled and the object's size."""

        def send_request() -> tuple[int, int]:
            deadline = time.monotonic() + self.options.part_timeout_s
            requested = f"bytes={start}-{start + len(buffer) - 1}"
            try:
                response = self._client.get_object(Bucket=self.name, Key=key, Range=requested)
            except ClientError as error:
                if _status(error) == 416:  # an empty object has no range
                    return 0, start
                raise
            with contextlib.closing(response["Body"]) as body:
                size = _size(_required(response, "ContentRange"))
                return _fill(body, buffer[: size - start], deadline, self.uri_of(key)), size

        return self._retried(key, send_request)

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
        response = self._retried(
            keys[0], lambda: self._client.delete_objects(Bucket=self.name, Delete=objects)
        )
        for failed in response.get("Errors", ()):
            raise TransientStorageError(
                self.uri_of(failed["Key"]), f"not deleted: {_named(failed.get('Code'))}"
            )

    def _page(self, operation: str, prefix: str, cursor: dict[str, Any]) -> Any:
        def send_request() -> Any:
            page = getattr(self._client, operation)(Bucket=self.name, Prefix=prefix, **cursor)
            _required(
                page, "IsTruncated"
            )  # a truncated response must not pass for an empty listing
            return page

        return self._retried(prefix, send_request)

    def _retried(self, key: str, send_request: Callable[[], T], attempts: int | None = None) -> T:
        retrying = stamina.retry_context(
            on=TransientStorageError,
            attempts=attempts or self.options.attempts,
            timeout=self.options.patience_s,
            wait_initial=_WAIT_INITIAL_S,
            wait_max=_WAIT_MAX_S,
            wait_jitter=_WAIT_INITIAL_S,
        )
        for attempt in retrying:
            with attempt, _translated(self.uri_of(key)):
                self._refuse_local_endpoint()
                return send_request()
        raise AssertionError("a retried block returns or raises")

    def _refuse_local_endpoint(self) -> None:
        """Refuse an endpoint at a local address. Called at every request, because the name of the
        host may get another address meanwhile."""
        endpoint = self.options.endpoint
        if not self.options.refuse_local or endpoint is None:
            return
        address = local_address(endpoint)
        if address is not None:
            raise StorageDenied(
                self.uri_of(""),
                f"the endpoint {endpoint} is at {address}, an address of this machine or of its "
                "link: use another, or set HOLDFAST_ALLOW_LOCAL_STORAGE=true for the server",
            )


class _Body:
    """A request body that is read in small pieces.

    Each piece has the socket's time-out, the whole body has a deadline.
    """

    def __init__(self, content: memoryview, deadline: float) -> None:
        self._content = content
        self._deadline = deadline
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        if time.monotonic() > self._deadline:
            raise TimeoutError("sending takes too long")
        until = len(self._content) if size < 0 else self._at + size
        piece = bytes(self._content[self._at : until])
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._content))[whence]
        return self._at

    def tell(self) -> int:
        return self._at


class _TruncatedResponse(Exception):
    """A response lacks a field that every complete response has."""


def _required(response: dict[str, Any], field: str) -> Any:
    if field not in response:
        raise _TruncatedResponse(f"a response without {field}: it was truncated")
    return response[field]


def _size(content_range: str) -> int:
    size = content_range.rpartition("/")[2]
    if not size.isdecimal():
        raise _TruncatedResponse("a response with an unreadable Content-Range")
    return int(size)


def _fill(body: Any, buffer: memoryview, deadline: float, uri: str) -> int:
    filled = 0
    while filled < len(buffer):
        piece = body.read(min(_READ_BYTES, len(buffer) - filled))
        if not piece:
            raise TransientStorageError(uri, f"truncated after {filled} of {len(buffer)} bytes")
        buffer[filled : filled + len(piece)] = piece
        filled += len(piece)
        if time.monotonic() > deadline:
            raise TransientStorageError(uri, f"only {filled} bytes arrived in time")
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
        retries={"total_max_attempts": 1, "mode": "standard"},  # `_retried` retries
        max_pool_connections=options.in_flight + 1,
        # Services other than AWS's own seldom have a host name for each bucket.
        s3={"addressing_style": "path" if options.endpoint else "auto"},
        request_checksum_calculation="when_required",  # some services lack the newer checksums
        response_checksum_validation="when_required",
        # The credentials of this machine are for AWS: no other service gets a signature by them.
        signature_version=UNSIGNED if options.endpoint and given is None else None,
    )
    return session.create_client(
        "s3", region_name=region, endpoint_url=options.endpoint, config=config
    )


_TRANSIENT_ERRORS = (
    HTTPClientError,
    NoConnection,
    IncompleteReadError,
    ResponseParserError,
    OSError,
    _TruncatedResponse,
)


@contextlib.contextmanager
def _translated(uri: str) -> Iterator[None]:
    try:
        yield
    except ClientError as error:
        raise _storage_error(uri, error) from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise StorageDenied(uri, f"{error}: {_REMEDY}") from error
    except _TRANSIENT_ERRORS as error:
        raise TransientStorageError(uri, _described(error)) from error
    except BotoCoreError as error:
        raise StorageError(uri, f"{type(error).__name__}: {error}") from error


def _storage_error(uri: str, error: ClientError) -> StorageError:
    status, code = _status(error), error.response["Error"].get("Code", "")
    reason = f"{_named(code)} (HTTP status {status})"
    if code == "NoSuchBucket":  # transient: submission has checked that the bucket exists
        reason += ": create the bucket, or correct its name or its endpoint in the spec"
    if code in _MISSING:
        return ObjectMissing(uri)
    if status == 412:
        return ObjectExists(uri)
    if code in _TRANSIENT or status >= 500 or status in _TRANSIENT_STATUS:
        return TransientStorageError(uri, reason)
    if status in _DENIED_STATUS:
        return StorageDenied(uri, f"{reason}: {_REMEDY}")
    if status in _MOVED_STATUS:
        return StorageDenied(uri, f"{reason}: set the bucket's region in the spec")
    return StorageError(uri, reason)


def _described(error: Exception) -> str:
    """The error's type, and its text unless that may quote the reply."""
    kind = type(error).__name__
    own = isinstance(error, _DESCRIBED) or type(error) is _TruncatedResponse
    return f"{kind}: {error}" if own or isinstance(error, TimeoutError) else kind


def _named(code: object) -> str:
    return str(code) if code in _NAMED_CODES else "refused"


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
