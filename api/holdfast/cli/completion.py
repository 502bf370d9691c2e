"""`completion`: completes commands, options and the names of jobs in bash, zsh and fish.

The scripts of the shells are short: they pass the words to `holdfast _candidates`, which prints a
line per candidate: the candidate, a tab, its description. It prints no errors. The engine of
cyclopts finds the candidates. The scripts that cyclopts generates are not used: they take seconds
at the start of each shell, and do not know the options of the next version.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from cyclopts import Parameter

from holdfast.cli.common import PLAIN
from holdfast.cli.exit_codes import ExitCode

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
            if PLAIN.fullmatch(candidate):
                shown = "".join(char if char.isprintable() else " " for char in description)
                sys.stdout.write(f"{candidate}\t{shown}\n")
    return ExitCode.OK


def candidates(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The candidates for the last word (which may be empty), each with a description."""
    from holdfast.cli.main import COMMANDS, build  # late: it refers to this module

    *before, prefix = words or [""]
    if not before:  # without loading them
        yield from ((each.name, each.help) for each in COMMANDS if each.name.startswith(prefix))
        return
    from cyclopts.completion._engine import compute_full_completions  # late: it is slow

    found = compute_full_completions(build(), [*before, prefix])
    yield from ((found.prefix + value, about) for value, about in found.candidates)
