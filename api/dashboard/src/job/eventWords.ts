/** An event in one line. Pure. */

import { bytes, compact, duration, ranges } from "./format";
import { words } from "./kinds";
import type { JobEvent } from "./views";

type Data = Record<string, unknown>;

const SAID: Record<string, (data: Data) => string> = {
  "job.submitted": (d) => `submitted as ${text(d["name"])}`,
  "job.state": (d) => `${text(d["from"])} → ${text(d["to"])}${d["reason"] ? `: ${text(d["reason"])}` : ""}`,
  phase: (d) => `the supervisor says ${text(d["phase"])}`,
  "attempt.forming": (d) => `attempt ${text(d["attempt"])} forms, ${text(d["world_size"])} ranks on ${mesh(d["mesh"])}`,
  "attempt.running": (d) => `attempt ${text(d["attempt"])} runs from step ${text(d["first_step"])}`,
  "attempt.ended": (d) => `attempt ${text(d["attempt"])} ended after step ${text(d["last_step"])}: ${text(d["reason"])}`,
  "incident.opened": (d) => `incident ${text(d["incident"])}: ${words(text(d["cause"]))}; ${first(d["evidence"])}`,
  "incident.updated": (d) => `incident ${text(d["incident"])}: ${text(d["decision"]) || words(text(d["cause"]))}`,
  "incident.closed": (d) => `incident ${text(d["incident"])} is over: ${text(d["resolution"])}`,
  "checkpoint.saved": (d) => `step ${text(d["step"])} is in the ${text(d["tier"])} tier, ${bytes(number(d["nbytes"]))}`,
  "checkpoint.deleted": (d) => `step ${text(d["step"])} was deleted: ${text(d["why"])}`,
  "checkpoint.bad": (d) => `step ${text(d["step"])} is bad: ${text(d["message"])}`,
  "checkpoint.interval": (d) => `${text(d["tier"])} every ${text(d["every_steps"])} steps: ${text(d["why"])}`,
  straggler: (d) => `rank ${text(d["rank"])} is ${text(d["state"])}, ${compact(number(d["factor"]))}× its peers`,
  standby: (d) => `${text(d["agent"])} is ${text(d["state"])}`,
  waiting: (d) => `waits for ${text(d["resource"])}`,
  "guard.tripped": (d) => `${words(text(d["kind"]))} at step ${text(d["step"])}: ${text(d["decision"])}`,
  "node.draining": (d) => `${text(d["host"])} is taken away, ranks ${list(d["ranks"])}`,
  ended: (d) => `${text(d["outcome"])}: ${text(d["message"])}`,
};

/** In words where the kind is known; else its fields. */
export function eventWords(event: JobEvent): string {
  const said = SAID[event.kind];
  if (said) return said(event.data).replace(/[:;,]\s*$/, "");
  return Object.entries(event.data)
    .filter(([, value]) => value !== null && typeof value !== "object")
    .slice(0, 6)
    .map(([key, value]) => `${words(key)} ${key.endsWith("_s") ? duration(number(value)) : text(value)}`)
    .join(" · ");
}

/** What an event is about, for its mark: trouble, recovery, saved, or neither. */
export function eventTone(kind: string): "bad" | "warn" | "good" | "neutral" {
  if (kind === "incident.opened" || kind === "checkpoint.bad" || kind === "digest.mismatch") return "bad";
  if (/^incident|straggler|guard|draining|stalled|attempt\.ended|fault/.test(kind)) return "warn";
  if (/saved|running|ended/.test(kind)) return "good";
  return "neutral";
}

function text(value: unknown): string {
  if (value === null || value === undefined) return "";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

const number = (value: unknown): number | null => (typeof value === "number" ? value : null);
const first = (value: unknown): string => (Array.isArray(value) ? text(value[0]) : text(value));
const list = (value: unknown): string => (Array.isArray(value) ? ranges(value as number[]) : text(value));

function mesh(value: unknown): string {
  if (typeof value !== "object" || value === null) return "one mesh";
  return Object.entries(value)
    .map(([axis, size]) => `${axis}=${String(size)}`)
    .join(" ");
}
