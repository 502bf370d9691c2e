"""What a job asks of its nodes' labels, and how a cluster's nodes are described in a reason. Pure.

A rule is `VALUE` (the label has it), several values (it has one of them), or `!VALUE` (it has none
of them; a node without the label qualifies). Ray's placement groups take the same rules as
selectors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

NOT = "!"
ACCELERATOR_PREFIX = "accelerator_type:"
"""Begins the resource of which Ray gives 1 to each node with accelerators of that type."""
MAX_LISTED = 5
"""Values of a label, or resources, that a reason lists."""


@dataclass(frozen=True)
class LabelRule:
    """One label of a node: one of `values`, or none of them if `negated`."""

    key: str
    values: tuple[str, ...]
    negated: bool = False

    @classmethod
    def of(cls, key: str, values: Sequence[str]) -> LabelRule:
        """The rule in the form of a spec: either all or none of `values` begin with `!`."""
        plain = tuple(value.removeprefix(NOT) for value in values)
        return cls(key, plain, negated=bool(values) and values[0].startswith(NOT))

    def allows(self, labels: Mapping[str, str]) -> bool:
        return (labels.get(self.key) in self.values) is not self.negated

    @property
    def selector(self) -> str:
        """The rule as a value of Ray's label selector."""
        listed = f"in({','.join(self.values)})" if len(self.values) > 1 else self.values[0]
        return f"{NOT if self.negated else ''}{listed}"

    def __str__(self) -> str:
        sign = "!=" if self.negated else "="
        return f"{self.key}{sign}{' or '.join(self.values)}"


def rules_of(labels: Mapping[str, Sequence[str]]) -> tuple[LabelRule, ...]:
    """The rules of a spec's `node_labels`, in the order of their keys."""
    return tuple(LabelRule.of(key, labels[key]) for key in sorted(labels))


def selector_of(rules: Iterable[LabelRule]) -> dict[str, str]:
    """Ray's label selector of a bundle."""
    return {rule.key: rule.selector for rule in rules}


def why_unlabelled(
    rules: Sequence[LabelRule], nodes: Collection[Mapping[str, str]], needed: int
) -> str:
    """Why fewer than `needed` of the nodes with these labels satisfy all rules; "" if enough do."""
    if not rules or sum(all(r.allows(labels) for r in rules) for labels in nodes) >= needed:
        return ""
    lacking = []
    for rule in rules:
        having = sum(rule.allows(labels) for labels in nodes)
        if having < needed:
            lacking.append(f"{_count(having, len(nodes))} label {rule}; {_values(rule.key, nodes)}")
    if lacking:
        return "; ".join(lacking)
    having = sum(all(rule.allows(labels) for rule in rules) for labels in nodes)
    return f"{_count(having, len(nodes))} all of the labels {', '.join(map(str, rules))}"


def why_too_little(
    amounts: Mapping[str, float], nodes: Collection[Mapping[str, float]], needed: int
) -> str:
    """Why fewer than `needed` of the nodes with these resources have `amounts` in all, in use or
    not; "" if enough have them."""
    if not amounts or sum(has_amounts(each, amounts) for each in nodes) >= needed:
        return ""
    lacking = []
    for name, amount in amounts.items():
        having = sum(has_amounts(resources, {name: amount}) for resources in nodes)
        if having < needed:
            most = max((resources.get(name, 0.0) for resources in nodes), default=0.0)
            there = f"the most is {most:g}" if most else _resources(nodes)
            lacking.append(f"{_count(having, len(nodes))} {amount_text(name, amount)}; {there}")
    if lacking:
        return "; ".join(lacking)
    having = sum(has_amounts(resources, amounts) for resources in nodes)
    wanted = ", ".join(amount_text(name, amount) for name, amount in amounts.items())
    return f"{_count(having, len(nodes))} all of {wanted}"


def amount_text(name: str, amount: float) -> str:
    """E.g. `2 fpga`, `accelerators H100`."""
    kind = name.removeprefix(ACCELERATOR_PREFIX)
    return f"accelerators {kind}" if kind != name else f"{amount:g} {name}"


SLACK = 1e-9  # sums of 0.1 CPUs


def has_amounts(free: Mapping[str, float], amounts: Mapping[str, float]) -> bool:
    return all(free.get(name, 0.0) + SLACK >= amount for name, amount in amounts.items())


def _count(having: int, nodes: int) -> str:
    if not having:
        return "no node has"
    return f"only {having} of {nodes} nodes {'has' if having == 1 else 'have'}"


def _values(key: str, nodes: Collection[Mapping[str, str]]) -> str:
    """E.g. `nodes have disk=hdd (3), 1 has no disk`."""
    found = Counter(labels[key] for labels in nodes if key in labels)
    parts = [f"{key}={value} ({times})" for value, times in found.most_common(MAX_LISTED)]
    if len(found) > MAX_LISTED:
        parts.append(f"{len(found) - MAX_LISTED} other values")
    without = len(nodes) - found.total()
    if without:
        parts.append(f"{without} {'has' if without == 1 else 'have'} no {key}")
    return f"nodes have {', '.join(parts)}" if found else f"nodes have no label {key}"


def _resources(nodes: Collection[Mapping[str, float]]) -> str:
    found = Counter(name for resources in nodes for name, amount in resources.items() if amount)
    listed = [f"{name} ({times})" for name, times in found.most_common(MAX_LISTED)]
    return f"nodes have {', '.join(listed) or 'no custom resources'}"
