/** The kinds of time and the phases of an incident: their labels, colours and hatches. */

import type { SpanKind } from "../../api/types";

export interface KindLook {
  label: string;
  /** CSS variable of its colour. */
  colour: string;
  /** Distinguishes the kinds without colour. */
  hatch: "none" | "rising" | "falling" | "dots" | "cross";
  /** Where two spans share a pixel, the span of the greater weight is drawn. */
  weight: number;
  means: string;
}

export const KINDS: Record<SpanKind, KindLook> = {
  productive: {
    label: "productive",
    colour: "--span-productive",
    hatch: "none",
    weight: 0,
    means: "steps that are part of the final history",
  },
  stopped: {
    label: "stopped",
    colour: "--span-stopped",
    hatch: "none",
    weight: 1,
    means: "off the cluster, or ended",
  },
  running: {
    label: "running",
    colour: "--span-productive",
    hatch: "dots",
    weight: 1,
    means: "the ranks run, and no step of this time is known",
  },
  away: {
    label: "away",
    colour: "--span-stopped",
    hatch: "cross",
    weight: 2,
    means: "nothing of the job ran, or its supervisor has not reported since",
  },
  finishing: {
    label: "finishing",
    colour: "--span-starting",
    hatch: "falling",
    weight: 2,
    means: "after the last step: saving the last checkpoint",
  },
  waiting: {
    label: "waiting",
    colour: "--span-waiting",
    hatch: "dots",
    weight: 2,
    means: "waiting for a resource",
  },
  starting: {
    label: "starting",
    colour: "--span-starting",
    hatch: "rising",
    weight: 3,
    means: "on the cluster, before the first step",
  },
  replaying: {
    label: "replaying",
    colour: "--span-replaying",
    hatch: "rising",
    weight: 4,
    means: "steps repeated after a rollback",
  },
  restoring: {
    label: "restoring",
    colour: "--span-restoring",
    hatch: "cross",
    weight: 5,
    means: "loading the state into the ranks",
  },
  recovering: {
    label: "recovering",
    colour: "--span-recovering",
    hatch: "falling",
    weight: 6,
    means: "fencing, deciding and forming the next attempt",
  },
  detecting: {
    label: "detecting",
    colour: "--span-detecting",
    hatch: "falling",
    weight: 7,
    means: "from the last step to the first signal",
  },
};

/** Productive time first, then the kinds of loss in the order in which a fault causes them. */
export const KIND_ORDER: readonly SpanKind[] = [
  "productive",
  "running",
  "detecting",
  "recovering",
  "restoring",
  "replaying",
  "starting",
  "finishing",
  "waiting",
  "away",
  "stopped",
];

/** The phases of an incident in their order, each with its kind of time. */
export const PHASES: readonly { name: string; label: string; kind: SpanKind }[] = [
  { name: "detect", label: "report of the fault", kind: "detecting" },
  { name: "gather", label: "gathering faults", kind: "detecting" },
  { name: "fence", label: "fencing", kind: "recovering" },
  { name: "decide", label: "decision", kind: "recovering" },
  { name: "form", label: "forming", kind: "recovering" },
  { name: "restore", label: "restore", kind: "restoring" },
  { name: "first_step", label: "first step", kind: "replaying" },
  { name: "outage", label: "outage", kind: "recovering" },
];

/** A code of the API with spaces: `worker_crash` → "worker crash". */
export function humanize(code: string | null | undefined): string {
  return (code ?? "").replace(/_/g, " ");
}

export function look(kind: string): KindLook {
  return KINDS[kind as SpanKind] ?? KINDS.waiting;
}
