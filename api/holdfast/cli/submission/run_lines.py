"""Lines about the ranks of a program that is followed: their processes, and whose error came first.
Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from holdfast_service.job_model.program_levels import ProgramLevel
from holdfast_service.policy.causes import Cause
from holdfast_service.views.attempts import AttemptView, MemberView
from holdfast_service.views.incident_text import PROCESS_LOSING, ranks_of
from holdfast_service.views.incidents import IncidentView
from holdfast_service.wording import plural, ranks_text

SHOWN_RANKS = 16


def places(attempt: AttemptView) -> str:
    """`attempt 1 runs: rank 0 pid 26653, rank 1 pid 26654 on n0`."""
    members = sorted(attempt.members, key=lambda member: member.rank)
    several_hosts = len({member.host for member in members}) > 1
    shown = members[:SHOWN_RANKS]
    parts = [
        f"{', '.join(f'rank {member.rank} pid {member.pid}' for member in on_agent)} on {agent}"
        for agent, on_agent in itertools.groupby(shown, lambda each: _place(each, several_hosts))
    ]
    more = len(members) - SHOWN_RANKS
    if more > 0:
        parts.append(f"and {plural(more, 'rank')} more (`holdfast describe`)")
    return f"attempt {attempt.number} runs: {'; '.join(parts)}"


def errors_of_others(incident: IncidentView, attempts: Sequence[AttemptView]) -> str | None:
    """`If rank 0 printed an error about a lost connection, it follows: it lost its peer.` None if
    no rank was the first to fail, or none was left."""
    if incident.cause not in PROCESS_LOSING | {Cause.USER_ERROR}:
        return None
    attempt = next((found for found in attempts if found.number == incident.attempt), None)
    lost = [item for item in incident.lost if item.cause != Cause.COMMUNICATION]
    failed = {rank for item in lost for rank in ranks_of(item)}
    if attempt is None or not failed:
        return None
    others = {member.rank for member in attempt.members} - failed
    if not others or incident.level >= ProgramLevel.CONTEXT:
        return None
    they = "it lost its peer" if len(others) == 1 else "they lost a peer"
    return f"If {ranks_text(others)} printed an error about a lost connection, it follows: {they}."


def _place(member: MemberView, with_host: bool) -> str:
    return f"{member.agent} ({member.host})" if with_host else member.agent
