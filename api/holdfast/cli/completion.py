"""`completion`: what a shell needs to complete commands, options and the names of living jobs.

The shells' parts are a few lines: they hand the words over to `holdfast _candidates`, which answers
with a candidate per line, a tab and what it is. It keeps quiet about whatever goes wrong.
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

SERVER_S = 1.0
MOST_JOBS = 200

BASH = """\
_holdfast() {
    local word=${COMP_WORDS[COMP_CWORD]} one
    COMPREPLY=()
    while IFS=$'\\t' read -r one _; do
        [[ $one == "$word"* ]] && COMPREPLY+=("$one")
    done < <(holdfast _candidates "${COMP_WORDS[@]:1:COMP_CWORD-1}" "$word" 2>/dev/null)
    (( ${#COMPREPLY[@]} )) && return
    while IFS= read -r one; do COMPREPLY+=("$one"); done < <(compgen -f -- "$word")
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
"""What no shell takes for anything but itself: a job's name is anybody's text."""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="Whose.")], /
) -> ExitCode:
    """Print the completion of a shell, with the names of living jobs.

    bash: source <(holdfast completion bash), in ~/.bashrc. zsh: the same in ~/.zshrc, after
    compinit. fish: holdfast completion fish > ~/.config/fish/completions/holdfast.fish
    """
    sys.stdout.write(SCRIPTS[shell])
    return ExitCode.OK


def complete(
    *words: Annotated[str, Parameter(allow_leading_hyphen=True)],
) -> ExitCode:
    """For the shells: candidates for the last of the words."""
    with contextlib.suppress(Exception):  # a shell has no use for what goes wrong
        for candidate, what in candidates(words):
            if _PLAIN.fullmatch(candidate):
                told = "".join(item if item.isprintable() else " " for item in what)
                sys.stdout.write(f"{candidate}\t{told}\n")
    return ExitCode.OK


def candidates(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What may stand where the last word is (which may be empty), and what each is."""
    from holdfast.cli.main import COMMANDS, build  # late: it names this module

    *before, begun = words or [""]
    if not before:
        yield from (
            (command.name, command.help) for command in COMMANDS if command.name.startswith(begun)
        )
        return
    app, path = build(), list(before)
    while path and path[0] in app and not path[0].startswith("-"):
        app = app[path.pop(0)]
    yield from _of_command(app, path, begun)


def _of_command(app: App, given: Sequence[str], begun: str) -> Iterator[tuple[str, str]]:
    arguments = list(app.assemble_argument_collection()) if app.default_command else []
    by_name = {
        name: argument for argument in arguments for name in argument.names if name.startswith("-")
    }
    expecting = by_name.get(given[-1]) if given else None
    if expecting is not None and expecting.hint is not bool:
        choices = (str(entry) for entry in expecting.get_choices() or ())
        yield from ((choice, "") for choice in choices if choice.startswith(begun))
        return
    if begun.startswith("-"):
        for name, one in by_name.items():
            if name.startswith(begun) and name.startswith("--"):
                yield name, (one.parameter.help or "").split("\n")[0]
        return
    if not given:
        for name in app:
            if not name.startswith("-") and name.startswith(begun):
                yield name, app[name].help.split("\n")[0]
    positionals = [item for item in arguments if not any(n.startswith("-") for n in item.names)]
    place = _place(given, by_name)
    if place >= len(positionals):
        return
    wanted = positionals[place]
    if "JOB" in wanted.names:
        yield from jobs(begun)
    else:
        choices = (str(element) for element in wanted.get_choices() or ())
        yield from ((one, "") for one in choices if one.startswith(begun))


def _place(given: Sequence[str], by_name: Mapping[str, object]) -> int:
    """How many positional words stand there already."""
    place, skip = 0, False
    for word in given:
        if skip:
            skip = False
        elif word.startswith("-") and word != "-":
            option = by_name.get(word)
            skip = option is not None and getattr(option, "hint", bool) is not bool
        else:
            place += 1
    return place


def jobs(begun: str) -> Iterator[tuple[str, str]]:
    """Names that one job alone has, ids of the others; living ones first."""
    from collections import Counter

    from holdfast.client.client import Client
    from holdfast.client.job_names import short

    address = os.environ.get("HOLDFAST_ADDRESS")
    with Client(address, retry_s=0.0, timeout_s=SERVER_S) as client:
        rows = client.rows(begun)
        found = [one for one, _ in zip(rows, range(MOST_JOBS), strict=False)]
    found.sort(key=lambda one: one.state.terminal)
    named = Counter(item.name for item in found)
    for prefix, one in zip(short([entry.id for entry in found]), found, strict=True):
        if named[one.name] == 1 and one.name.startswith(begun) and _PLAIN.fullmatch(one.name):
            yield one.name, one.state.value
        elif one.id.startswith(begun):
            yield prefix, f"{one.name} {one.state.value}"
