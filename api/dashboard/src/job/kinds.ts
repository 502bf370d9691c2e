/** The kinds of time, causes and decisions: their words, their colours, their marks. */

import type { SpanKind } from "./views";

export interface KindLook {
  label: string;
  /** CSS variable of its colour. */
  colour: string;
  /** What tells it from others without colour. */
  hatch: "none" | "rising" | "falling" | "dots" | "cross";
  /** Which is drawn where two share a pixel: the higher one. */
  weight: number;
  means: string;
}

export const KINDS: Record<SpanKind, KindLook> = {
  productive: {
    label: "productive",
    colour: "--span-productive",
    hatch: "none",
    weight: 0,
    means: "steps that are part of history",
  },
  stopped: {
    label: "stopped",
    colour: "--span-stopped",
    hatch: "none",
    weight: 1,
    means: "off the cluster, or ended",
  },
  finishing: {
    label: "finishing",
    colour: "--span-starting",
    hatch: "falling",
    weight: 2,
    means: "after the last step: its checkpoint",
  },
  waiting: {
    label: "waiting",
    colour: "--span-waiting",
    hatch: "dots",
    weight: 2,
    means: "for a resource that it names",
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
    means: "steps that had to be made again",
  },
  restoring: {
    label: "restoring",
    colour: "--span-restoring",
    hatch: "cross",
    weight: 5,
    means: "state moves back into the ranks",
  },
  recovering: {
    label: "recovering",
    colour: "--span-recovering",
    hatch: "falling",
    weight: 6,
    means: "fence, decide, form the next attempt",
  },
  detecting: {
    label: "detecting",
    colour: "--span-detecting",
    hatch: "falling",
    weight: 7,
    means: "from the last step to the first signal",
  },
};

/** In the order of a fault's way. */
export const KIND_ORDER: readonly SpanKind[] = [
  "productive",
  "detecting",
  "recovering",
  "restoring",
  "replaying",
  "starting",
  "finishing",
  "waiting",
  "stopped",
];

/** Phases of an incident, in order, and the kind of time that each belongs to. */
export const PHASES: readonly { name: string; label: string; kind: SpanKind }[] = [
  { name: "detect", label: "detect", kind: "detecting" },
  { name: "gather", label: "gather", kind: "detecting" },
  { name: "fence", label: "fence", kind: "recovering" },
  { name: "decide", label: "decide", kind: "recovering" },
  { name: "form", label: "form", kind: "recovering" },
  { name: "restore", label: "restore", kind: "restoring" },
  { name: "first_step", label: "first step", kind: "replaying" },
];

/** A code of the API in words: `worker_crash` → "worker crash". */
export function words(code: string | null | undefined): string {
  return (code ?? "").replace(/_/g, " ");
}

export function look(kind: string): KindLook {
  return KINDS[kind as SpanKind] ?? KINDS.waiting;
}
