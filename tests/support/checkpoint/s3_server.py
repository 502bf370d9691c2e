"""A real S3-protocol server in a process of its own: moto's, with its own buckets and clock.

`python -m tests.support.checkpoint.s3_server FD` serves until the connection closes. `S3Server`
starts it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import boto3

CREDENTIALS = {"access_key_id": "holdfast-test", "secret_access_key": "not-a-secret"}
START_S = 60.0


class S3Server:
    def __init__(self) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "tests.support.checkpoint.s3_server", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._connection = ours
        if not ours.poll(START_S):
            self.close()
            raise TimeoutError(f"no S3 server within {START_S} s")
        self.port: int = ours.recv()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._as_tester = {
            "endpoint_url": self.endpoint,
            "region_name": "us-east-1",
            "aws_access_key_id": CREDENTIALS["access_key_id"],
            "aws_secret_access_key": CREDENTIALS["secret_access_key"],
        }
        self.client: Any = boto3.client("s3", **self._as_tester)

    def new_bucket(self) -> str:
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self.client.create_bucket(Bucket=name)
        return name

    def objects(self, bucket: str) -> list[str]:
        objects = self.client.list_objects_v2(Bucket=bucket).get("Contents", [])
        return [item["Key"] for item in objects]

    def uploads(self, bucket: str) -> list[str]:
        """Keys of multipart uploads that were neither completed nor aborted."""
        uploads = self.client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
        return [upload["Key"] for upload in uploads]

    def new_user(self, bucket: str, actions: list[str]) -> dict[str, str]:
        """Credentials of a new user with the permissions `actions` in `bucket`, which is created if
        missing. moto admits every user until `check_credentials(True)`."""
        self.check_credentials(False)
        self.client.create_bucket(Bucket=bucket)
        iam = boto3.client("iam", **self._as_tester)
        name = f"user-{uuid.uuid4().hex[:8]}"
        resources = [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]
        policy = {"Effect": "Allow", "Action": actions, "Resource": resources}
        document = json.dumps({"Version": "2012-10-17", "Statement": [policy]})
        iam.create_user(UserName=name)
        iam.put_user_policy(UserName=name, PolicyName="checkpoints", PolicyDocument=document)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        self.check_credentials(True)
        return {
            "access_key_id": key["AccessKeyId"],
            "secret_access_key": key["SecretAccessKey"],
        }

    def check_credentials(self, check: bool) -> None:
        """Enable or disable the checks of signatures and permissions that AWS makes."""
        unchecked = b"0" if check else b"inf"
        url = f"{self.endpoint}/moto-api/reset-auth"
        plain = {"Content-Type": "text/plain"}
        request = urllib.request.Request(url, data=unchecked, headers=plain)
        urllib.request.urlopen(request, timeout=60).close()

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Its process is stopped: connections are accepted, and nothing answers."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._connection.close()
        self._process.wait(60)


def main() -> None:
    from moto.server import ThreadedMotoServer

    connection = Connection(int(sys.argv[1]))
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    connection.send(server.get_host_and_port()[1])
    try:
        connection.recv()
    except EOFError:
        server.stop()


if __name__ == "__main__":
    main()
