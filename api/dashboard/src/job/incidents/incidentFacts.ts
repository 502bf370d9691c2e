/**
 * The facts of an incident as sentences, costs and phase bars. Pure. A cause, tier or key that this
 * version does not know is tolerated: a newer server may send it.
 */

import type { IncidentView, SpanKind } from "../../api/types";
import { coarse, compact, fineDuration, ranges, whole, type NodeIdShortener } from "../format";
import { direction } from "../worldLayout";
import { humanize, PHASES } from "./kinds";

const CAUSES: Record<string, string> = {
  node_lost: "a node was lost",
  preempted: "a node was preempted",
  node_unwell: "a health probe found a node unfit for training",
  agent_lost: "an agent was lost",
  out_of_memory: "the kernel killed a process because memory ran out",
  worker_crash: "the process of a rank ended unexpectedly",
  corruption: "a rank computed other bits than its replicas",
  hang: "a rank stopped making progress",
  user_error: "the training program raised an error",
  bad_state: "a saved state could not be loaded",
  not_finite: "the first step after a restore was not finite",
  guard: "the loss or the gradients were out of bounds",
  checkpoint_failed: "a shard of the last checkpoint could not be written",
  internal_error: "an internal error of Holdfast occurred",
  no_progress: "an attempt did not reach its first step in time",
  straggler: "a rank computed more slowly than its peers",
  resize: "another mesh was due",
  restore_unavailable: "the remote storage did not answer during a restore",
  remote_unavailable: "the remote storage accepted no checkpoint",
  communication: "ranks lost their connections, and no process was seen to end",
};

/** Causes after which the processes of the ranks are gone; the others only affect them. */
const PROCESS_LOSING: ReadonlySet<string> = new Set([
  "node_lost",
  "agent_lost",
  "out_of_memory",
  "worker_crash",
  "preempted",
  "",
]);

/** "a node was lost"; an unknown cause by its own name. */
export function causeClause(cause: string): string {
  return CAUSES[cause] ?? (humanize(cause) || "an unknown fault occurred");
}

/** Whether nothing failed: the world was only to have another mesh. */
export const isResize = (incident: IncidentView): boolean => incident.cause === "resize";

/** The heading of a card: "A node was lost", "The world grew from 6 to 8 ranks". */
export function title(incident: IncidentView): string {
  const change = incident.mesh_change;
  if (isResize(incident) && change) {
    return `The world ${direction(change)} from ${change.ranks_before} to ${change.ranks_after} ranks`;
  }
  return capitalized(causeClause(incident.cause));
}

/** The text with a full stop and a capital letter, unless its first word is an identifier. */
export function sentence(text: string): string {
  const stripped = text.trim().replace(/\s+/g, " ");
  if (!stripped) return "";
  const begun = /^[a-z]+(?=\s|$)/.test(stripped) ? capitalized(stripped) : stripped;
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}

function capitalized(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

export interface PhaseBar {
  name: string;
  label: string;
  kind: SpanKind;
  seconds: number;
  /** Share of the drawn width, 0 to 1; the shares sum to 1. */
  share: number;
}

/** Keeps a phase of a few milliseconds visible beside a phase of seconds. */
const LEAST_SHARE = 0.025;

/** The phases that took time, in order; phases of unknown names come last. */
export function phaseBars(phases_s: Record<string, number | null>): PhaseBar[] {
  const known = PHASES.filter(({ name }) => (phases_s[name] ?? 0) > 0).map((phase) => ({
    ...phase,
    seconds: phases_s[phase.name]!,
  }));
  const named = new Set(["total", ...PHASES.map(({ name }) => name)]);
  const others = Object.entries(phases_s)
    .filter(([name, seconds]) => !named.has(name) && (seconds ?? 0) > 0)
    .map(([name, seconds]) => ({
      name,
      label: humanize(name),
      kind: "recovering" as const,
      seconds: seconds!,
    }));
  const all = [...known, ...others];
  const sum = all.reduce((total, bar) => total + bar.seconds, 0);
  if (!sum) return [];
  const raised = all.map((bar) => Math.max(bar.seconds / sum, LEAST_SHARE));
  const over = raised.reduce((total, share) => total + share, 0);
  return all.map((bar, index) => ({ ...bar, share: raised[index]! / over }));
}

/** Seconds from the first signal to the first new step; null while the incident is open. */
export function total(incident: IncidentView): number | null {
  const measured = incident.phases_s["total"];
  if (measured != null) return measured;
  if (incident.closed_at === null) return null;
  return incident.closed_at - (incident.signalled_at ?? incident.opened_at);
}

/** The costs, each as a value and its label; no entry for a cost that is zero or unknown. */
export function costs(incident: IncidentView): { label: string; value: string }[] {
  const found: { label: string; value: string }[] = [];
  const took = total(incident);
  if (took !== null) found.push({ label: "until the next new step", value: fineDuration(took) });
  if (incident.steps_lost != null) {
    const steps = incident.steps_lost;
    found.push({ label: steps === 1 ? "step to repeat" : "steps to repeat", value: whole(steps) });
  }
  if (incident.device_seconds_lost > 0) {
    const seconds = incident.device_seconds_lost;
    found.push(
      seconds < 3600
        ? { label: "device time lost", value: coarse(seconds) }
        : { label: "device-hours lost", value: compact(seconds / 3600) },
    );
  }
  if (incident.restored_step !== null) {
    found.push({ label: "restored step", value: whole(incident.restored_step) });
  }
  return found;
}

type LostItem = IncidentView["lost"][number];

/** `Ranks 4–7 on agent n1 were lost.`: a sentence for each item of `lost`. */
export function lostSentences(incident: IncidentView): string[] {
  return incident.lost.map((item) => lostSentence(item, incident));
}

function lostSentence(item: LostItem, incident: IncidentView): string {
  const { cause } = item;
  const ranks = !item.ranks.length && item.rank != null ? [item.rank] : item.ranks;
  const verb = PROCESS_LOSING.has(cause) ? "lost" : "affected";
  let text = `${lostSubject(item, ranks)} ${ranks.length > 1 ? "were" : "was"} ${verb}`;
  if (item.attempt != null && item.attempt !== incident.attempt) text += ` in attempt ${item.attempt}`;
  if (item.on_notice) text += ", after the cluster had announced the removal of the node";
  if (cause && cause !== incident.cause) text += `: ${causeClause(cause)}`;
  return sentence(text);
}

function lostSubject(item: LostItem, ranks: readonly number[]): string {
  const place = item.agent ? ` on agent ${item.agent}` : "";
  const process = item.worker ? `process ${item.worker}` : "";
  if (ranks.length) return `${ranksText(ranks, 8)}${place}${process && ` (${process})`}`;
  if (process) return `${process}${place}`;
  return item.agent ? `agent ${item.agent}` : "no particular rank";
}

/** "rank 3", "ranks 0–7, 12". */
export function ranksText(ranks: readonly number[], most = 4): string {
  return `${ranks.length === 1 ? "rank" : "ranks"} ${ranges(ranks, most)}`;
}

const TIERS: Record<string, string> = {
  own_ram: "own RAM",
  partner_ram: "a partner's RAM",
  reshard: "the RAM of ranks of another mesh",
  remote: "remote storage",
  init: "the job's initial state",
};

/** The source of the restored state with its ranks, the source of the most ranks first. */
export function tiers(incident: IncidentView): { tier: string; ranks: number[] }[] {
  const found = new Map<string, number[]>();
  for (const [rank, tier] of Object.entries(incident.tiers)) {
    const name = TIERS[tier] ?? humanize(tier);
    const members = found.get(name);
    if (members) members.push(Number(rank));
    else found.set(name, [Number(rank)]);
  }
  return [...found].map(([tier, ranks]) => ({ tier, ranks })).sort((a, b) => b.ranks.length - a.ranks.length);
}

/** Registers the node ids in all texts of the incidents that the cards show. */
export function learnNodeIds(ids: NodeIdShortener, incidents: readonly IncidentView[]): void {
  for (const { evidence, lost, suspects, reason, resolution, refused } of incidents) {
    ids.learn(JSON.stringify([evidence, lost, suspects, reason, resolution, refused]));
  }
}
