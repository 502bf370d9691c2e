/** An event as one line of text. Pure. */

import type { EventView } from "../../api/types";
import { bytes, clock, compact, fineDuration, ranges } from "../format";
import { causeClause } from "./incidentFacts";
import { humanize } from "./kinds";

type Data = Record<string, unknown>;

const TEXTS: Record<string, (data: Data) => string> = {
  "job.submitted": (d) => `the job was submitted as ${text(d["name"])}`,
  "job.state": (d) => `${text(d["from"])} → ${text(d["to"])}${d["reason"] ? `: ${text(d["reason"])}` : ""}`,
  "job.cancel_requested": () => "a user requested the cancellation of the job",
  "job.pause_requested": () => "a user requested a pause of the job",
  "job.restart_requested": () => "a user requested new processes for the job",
  "job.resize_requested": (d) =>
    d["nodes"] === null ? "a user ordered as many nodes as the job may have" : `a user ordered at most ${text(d["nodes"])} nodes`,
  "rows.lost": (d) => `the metrics and digests of the steps between ${text(d["after"])} and ${text(d["before"])} were lost`,
  "job.resume_requested": () => "a user requested that the job resumes",
  "job.initialised_from": (d) => `the initial state came from ${text(d["uri"])}; training continues from step ${text(d["step"])}`,
  "job.stopping": (d) => `the job saves its state after step ${text(d["step"])} and stops: ${text(d["reason"])}`,
  "job.stop_undone": (d) => `the job continues after step ${text(d["step"])}: ${text(d["reason"])}`,
  phase: (d) => `the supervisor reports ${text(d["phase"])}`,
  "attempt.forming": (d) => `attempt ${text(d["attempt"])} is forming: ${text(d["world_size"])} ranks on ${mesh(d["mesh"])}`,
  "attempt.running": (d) => `attempt ${text(d["attempt"])} runs from step ${text(d["first_step"])}`,
  "attempt.ended": (d) => `attempt ${text(d["attempt"])} ended after step ${text(d["last_step"])}: ${text(d["reason"])}`,
  "incident.opened": (d) => `incident ${text(d["incident"])} was opened: ${causeClause(text(d["cause"]))}; ${first(d["evidence"])}`,
  "incident.updated": (d) =>
    `incident ${text(d["incident"])}: ${d["decision"] ? `the decision was to ${text(d["decision"])}` : causeClause(text(d["cause"]))}`,
  "incident.closed": (d) => `incident ${text(d["incident"])} was closed: ${text(d["resolution"])}`,
  "checkpoint.saved": (d) => `step ${text(d["step"])} is saved in the ${text(d["tier"])} tier, ${bytes(number(d["nbytes"]))}`,
  "checkpoint.deleted": (d) => `the checkpoint of step ${text(d["step"])} was deleted: ${text(d["why"])}`,
  "checkpoint.bad": (d) => `the checkpoint of step ${text(d["step"])} is damaged: ${text(d["message"])}`,
  "checkpoint.interval": (d) => `the ${text(d["tier"])} tier saves every ${text(d["every_steps"])} steps: ${text(d["why"])}`,
  "program.attached": (d) =>
    `the program of attempt ${text(d["attempt"])} attached${d["integration"] ? ` through ${text(d["integration"])}` : ""} at level ${text(d["level"])}`,
  "program.resumed": (d) => `the program continues from step ${text(d["restored_step"])}, its own checkpoint`,
  stalled: (d) => `attempt ${text(d["attempt"])} is stalled at step ${text(d["step"])}: ${text(d["reason"])}`,
  straggler: (d) => `rank ${text(d["rank"])} is ${text(d["state"])}, at ${compact(number(d["factor"]))}× the time of its peers`,
  standby: (d) => `the standby agent ${text(d["agent"])} is ${text(d["state"])}`,
  waiting: (d) => `waiting for ${text(d["resource"])}${d["reason"] ? `: ${text(d["reason"])}` : ""}`,
  "guard.tripped": (d) => `${humanize(text(d["kind"]))} at step ${text(d["step"])}; decision: ${humanize(text(d["decision"]))}`,
  "node.draining": (d) => `the cluster removes node ${text(d["host"])} with ranks ${list(d["ranks"])}`,
  "node.quarantined": (d) =>
    `node ${text(d["node"])} is quarantined${typeof d["until"] === "number" ? ` until ${clock(d["until"])}` : ""}: ${text(d["reason"])}`,
  "digest.mismatch": (d) => `the digest of step ${text(d["step"])} differs from the stored digest in attempt ${text(d["attempt"])}`,
  "fault.failed": (d) => `a fault could not be injected on agent ${text(d["agent"])}: ${text(d["why"])}`,
  ended: (d) => `the job ended as ${text(d["outcome"])}: ${text(d["message"])}`,
};

/** A clause for an event of a known kind; the names and values of the data for any other kind. */
export function eventText(event: EventView): string {
  const render = TEXTS[event.kind];
  if (render) return render(event.data).replace(/[:;,]\s*$/, "");
  return Object.entries(event.data)
    .filter(([, value]) => value !== null && value !== false && value !== "" && typeof value !== "object")
    .slice(0, 6)
    .map(([key, value]) =>
      key.endsWith("_s") ? `${humanize(key.slice(0, -2))} ${fineDuration(number(value))}` : `${humanize(key)} ${text(value)}`,
    )
    .join(", ");
}

/** The tone of an event, for its colour: a fault, a recovery, a success, or neither. */
export function eventTone({ kind, data }: EventView): "bad" | "warn" | "good" | "neutral" {
  if (kind.startsWith("incident") && data["cause"] === "resize") return "neutral";
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
