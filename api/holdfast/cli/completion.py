"""`completion`: completes commands, options and the names of jobs in bash, zsh and fish.

The scripts of the shells are short: they pass the words to `holdfast _candidates`, which prints a
line per candidate: the candidate, a tab, its description. It prints no errors.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from holdfast.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from cyclopts import App

SERVER_TIMEOUT_S = 1.0
MAX_JOBS = 200

BASH = """\
_holdfast() {
    local word=${COMP_WORDS[COMP_CWORD]} candidate
    COMPREPLY=()
    while IFS=$'\\t' read -r candidate _; do
        [[ $candidate == "$word"* ]] && COMPREPLY+=("$candidate")
    done < <(holdfast _candidates "${COMP_WORDS[@]:1:COMP_CWORD-1}" "$word" 2>/dev/null)
    (( ${#COMPREPLY[@]} )) && return
    while IFS= read -r candidate; do COMPREPLY+=("$candidate"); done < <(compgen -f -- "$word")
}
complete -F _holdfast holdfast
"""
ZSH = """\
#compdef holdfast
_holdfast() {
    local -a found
    local line
    for line in "${(@f)$(holdfast _candidates "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        [[ -n $line ]] && found+=("${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}")
    done
    if (( ${#found} )); then _describe holdfast found; else _files; fi
}
compdef _holdfast holdfast
"""
FISH = """\
function __holdfast_complete
    set -l words (commandline -opc) (commandline -ct)
    holdfast _candidates $words[2..-1] 2>/dev/null
end
complete -c holdfast -a '(__holdfast_complete)'
"""
_PLAIN = re.compile(r"[A-Za-z0-9._-]+")
"""A text that no shell interprets: a job's name is chosen by any user."""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="The shell.")], /
) -> ExitCode:
    """Print the completion script of a shell; it also completes the names of jobs.

    bash: source <(holdfast completion bash), in ~/.bashrc. zsh: the same in ~/.zshrc, after
    compinit. fish: holdfast completion fish > ~/.config/fish/completions/holdfast.fish
    """
    sys.stdout.write(SCRIPTS[shell])
    return ExitCode.OK


def complete(
    *words: Annotated[str, Parameter(allow_leading_hyphen=True)],
) -> ExitCode:
    """Print the candidates for the last word; called by the shells."""
    with contextlib.suppress(Exception):  # a shell cannot show errors
        for candidate, description in candidates(words):
            if _PLAIN.fullmatch(candidate):
                shown = "".join(char if char.isprintable() else " " for char in description)
                sys.stdout.write(f"{candidate}\t{shown}\n")
    return ExitCode.OK


def candidates(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The candidates for the last word (which may be empty), each with a description."""
    from holdfast.cli.main import COMMANDS, build  # late: it refers to this module

    *before, prefix = words or [""]
    if not before:
        yield from (
            (command.name, command.help) for command in COMMANDS if command.name.startswith(prefix)
        )
        return
    app, path = build(), list(before)
    while path and path[0] in app and not path[0].startswith("-"):
        app = app[path.pop(0)]
    yield from _command_candidates(app, path, prefix)


def _command_candidates(app: App, given: Sequence[str], prefix: str) -> Iterator[tuple[str, str]]:
    arguments = list(app.assemble_argument_collection()) if app.default_command else []
    by_name = {
        name: argument for argument in arguments for name in argument.names if name.startswith("-")
    }
    expecting = by_name.get(given[-1]) if given else None
    if expecting is not None and expecting.hint is not bool:
        choices = (str(choice) for choice in expecting.get_choices() or ())
        yield from ((choice, "") for choice in choices if choice.startswith(prefix))
        return
    if prefix.startswith("-"):
        for name, argument in by_name.items():
            if name.startswith(prefix) and name.startswith("--"):
                yield name, (argument.parameter.help or "").split("\n")[0]
        return
    if not given:
        for name in app:
            if not name.startswith("-") and name.startswith(prefix):
                yield name, app[name].help.split("\n")[0]
    positionals = [
        argument
        for argument in arguments
        if not any(name.startswith("-") for name in argument.names)
    ]
    index = _count_positionals(given, by_name)
    if index >= len(positionals):
        return
    wanted = positionals[index]
    if "JOB" in wanted.names:
        yield from jobs(prefix)
    else:
        choices = (str(choice) for choice in wanted.get_choices() or ())
        yield from ((choice, "") for choice in choices if choice.startswith(prefix))


def _count_positionals(given: Sequence[str], by_name: Mapping[str, object]) -> int:
    """The number of positional arguments among the given words."""
    count, skip = 0, False
    for word in given:
        if skip:
            skip = False
        elif word.startswith("-") and word != "-":
            option = by_name.get(word)
            skip = option is not None and getattr(option, "hint", bool) is not bool
        else:
            count += 1
    return count


def jobs(prefix: str) -> Iterator[tuple[str, str]]:
    """The names of jobs, or the ids of jobs whose name is not unique; active jobs first."""
    from collections import Counter

    from holdfast.client.job_names import short
    from holdfast.client.synchronous.client import Client

    address = os.environ.get("HOLDFAST_ADDRESS")
    with Client(address, retry_s=0.0, timeout_s=SERVER_TIMEOUT_S) as client:
        rows = client.list(prefix)
        found = [job for job, _ in zip(rows, range(MAX_JOBS), strict=False)]
    found.sort(key=lambda job: job.state.terminal)
    count_of_name = Counter(job.name for job in found)
    for short_id, job in zip(short([job.id for job in found]), found, strict=True):
        unique = count_of_name[job.name] == 1 and _PLAIN.fullmatch(job.name)
        if unique and job.name.startswith(prefix):
            yield job.name, job.state.value
        elif job.id.startswith(prefix):
            yield short_id, f"{job.name} {job.state.value}"
