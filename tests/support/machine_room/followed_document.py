"""Runs a document's blocks in a machine room, in the order of the page and word for word.

A block with a title names the hosts on which its commands run (`title="a, b"`), or the file that it
is (`title="a: ~/file"`). Three programs are not on the hosts, and the room does their work: `scp`
copies a file between hosts, `systemctl` runs and ends the program of a unit in `deploy/systemd`,
and `holdfast serve` gets a terminal of its own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.support.machine_room.host import HOME, Host, HostProcess
from tests.support.machine_room.room import MachineRoom
from tests.support.waiting import eventually

DEPLOY = Path(__file__).parents[3] / "deploy/systemd"
COMMAND_S = 200.0
READY_S = 60.0
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^## (.*)$", re.MULTILINE)
_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")


@dataclass(frozen=True)
class Block:
    section: str
    language: str
    title: str
    text: str

    @property
    def hosts(self) -> list[str]:
        return [name.strip() for name in self.title.partition(":")[0].split(",")]

    @property
    def file(self) -> str | None:
        """The path that the block's text is for; None: it is commands."""
        return self.title.partition(":")[2].strip().replace("~", HOME, 1) or None


def blocks(text: str) -> list[Block]:
    headings = [(found.start(), found[1]) for found in _HEADING.finditer(text)]
    return [
        Block(
            next((name for at, name in reversed(headings) if at < found.start()), ""),
            found[1],
            found[2] or "",
            found[3],
        )
        for found in _BLOCK.finditer(text)
    ]


class FollowedDocument:
    def __init__(self, room: MachineRoom) -> None:
        self._room = room
        self.started: dict[tuple[str, str], HostProcess] = {}  # by host, and program or unit

    def follow(self, block: Block) -> None:
        if block.file is not None:
            path = block.file if block.file.startswith("/") else f"{HOME}/{block.file}"
            for name in block.hosts:
                self._room[name].write(path, block.text)
            return
        for line in block.text.splitlines():
            with ThreadPoolExecutor(len(block.hosts)) as pool:
                list(pool.map(lambda name, line=line: self._run(name, line), block.hosts))

    def _run(self, name: str, line: str) -> None:
        host, words = self._room[name], shlex.split(line)
        if words[0] == "scp":
            there, _, path = words[2].partition(":")
            text = host.read(words[1].replace("~", HOME, 1))
            self._room[there].write(f"{HOME}/{path}", text)
        elif words[0] == "systemctl":
            self._start_unit(host, words[-1])
        elif words[:2] == ["holdfast", "serve"]:
            serving = self.started[name, "serve"] = host.start(f"exec {line}")
            eventually(lambda: "serves at" in serving.output() or serving.status, READY_S)
            assert serving.status is None, serving.output()
        else:
            host.run(line, timeout_s=COMMAND_S)

    def _start_unit(self, host: Host, unit: str) -> None:
        lines = (DEPLOY / f"{unit}.service").read_text().splitlines()
        settings = dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")
        file = settings["EnvironmentFile"].removeprefix("-")
        variables = dict(line.split("=", 1) for line in host.read(file).splitlines())
        words = as_systemd(settings["ExecStart"], variables)
        program = [Path(words[0]).name, *words[1:]]
        started = self.started[host.name, unit] = host.start(program, **variables)
        eventually(lambda: "is a node of" in started.output() or started.status, COMMAND_S)
        assert started.status is None, started.output()


def as_systemd(command: str, variables: Mapping[str, str]) -> list[str]:
    """The words of an `ExecStart`: `${NAME}` is one word, `$NAME` as many as it has."""
    words: list[str] = []
    for word in command.split():
        found = _VARIABLE.fullmatch(word)
        if found is None:
            words.append(word)
        elif found[1]:
            words.append(variables.get(found[1], ""))
        else:
            words += variables.get(found[2], "").split()
    return words
