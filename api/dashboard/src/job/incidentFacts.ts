/** What an incident says, in the order in which a reader asks: what was it, what did it cost. Pure. */

import { coarse, compact, duration, ranges, whole } from "./format";
import { PHASES, words } from "./kinds";
import type { Incident, SpanKind } from "./views";

const CAUSES: Record<string, string> = {
  node_lost: "A node was lost",
  preempted: "A node is taken away",
  node_unwell: "A node is not fit to train on",
  agent_lost: "A node agent was lost",
  out_of_memory: "A worker ran out of memory",
  worker_crash: "A worker crashed",
  corruption: "A rank computed other bits",
  hang: "A rank hung",
  user_error: "The program raised an error",
  bad_state: "A saved state could not be loaded",
  not_finite: "A restored state was not finite",
  guard: "Loss or gradients went out of bounds",
  checkpoint_failed: "The last checkpoint could not be written",
  internal_error: "Holdfast itself failed",
  no_progress: "An attempt did not come up in time",
  straggler: "A rank computed too slowly",
  restore_unavailable: "Remote storage did not answer at a restore",
  remote_unavailable: "Remote storage takes no checkpoint",
  communication: "A connection between ranks broke",
};

export function title(incident: Incident): string {
  const said = CAUSES[incident.cause] ?? words(incident.cause);
  return said.charAt(0).toUpperCase() + said.slice(1);
}

export interface PhaseBar {
  name: string;
  label: string;
  kind: SpanKind;
  seconds: number;
  /** Of the drawn width, 0 to 1; the shares sum to 1. */
  share: number;
}

/** A phase of some milliseconds is still to be seen beside one of seconds. */
const LEAST_SHARE = 0.025;

/** The phases that took time, in order; those not known by name go last. */
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
      label: words(name),
      kind: "recovering" as const,
      seconds: seconds!,
    }));
  const all = [...known, ...others];
  const sum = all.reduce((total, one) => total + one.seconds, 0);
  if (!sum) return [];
  const raised = all.map((one) => Math.max(one.seconds / sum, LEAST_SHARE));
  const over = raised.reduce((total, one) => total + one, 0);
  return all.map((one, index) => ({ ...one, share: raised[index]! / over }));
}

export function total(incident: Incident): number | null {
  const told = incident.phases_s["total"];
  if (told != null) return told;
  if (incident.closed_at === null) return null;
  return incident.closed_at - (incident.signalled_at ?? incident.opened_at);
}

/** What it cost, in short words; nothing where nothing was lost. */
export function costs(incident: Incident): { label: string; value: string }[] {
  const found: { label: string; value: string }[] = [];
  const took = total(incident);
  if (took !== null) found.push({ label: "until the next new step", value: duration(took) });
  if (incident.steps_lost != null) {
    const steps = incident.steps_lost;
    found.push({ label: steps === 1 ? "step to make again" : "steps to make again", value: whole(steps) });
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
    found.push({ label: "state taken from step", value: whole(incident.restored_step) });
  }
  return found;
}

interface LostThing {
  cause?: unknown;
  ranks?: unknown;
  rank?: unknown;
  worker?: unknown;
  agent?: unknown;
  on_notice?: unknown;
}

/** One line for each thing that was taken away. */
export function lostThings(incident: Incident): string[] {
  return incident.lost.map((one) => {
    if (typeof one !== "object" || one === null) return String(one);
    const { cause, ranks, rank, worker, agent, on_notice } = one as LostThing;
    const hit = Array.isArray(ranks) ? (ranks as number[]) : typeof rank === "number" ? [rank] : [];
    const parts = [
      hit.length ? `${hit.length === 1 ? "rank" : "ranks"} ${ranges(hit)}` : "",
      worker ? `worker ${String(worker)}` : "",
      agent && !worker ? `agent ${String(agent)}` : "",
      on_notice ? "on notice" : "",
    ].filter(Boolean);
    return `${words(String(cause ?? ""))}: ${parts.join(", ") || "no rank"}`;
  });
}

const TIERS: Record<string, string> = {
  own_ram: "own memory",
  partner_ram: "a partner's memory",
  reshard: "memory of another mesh",
  remote: "remote storage",
  init: "the beginning",
};

/** "from own memory 1022 ranks, from partner's memory 2 ranks". */
export function tiers(incident: Incident): { tier: string; ranks: number[] }[] {
  const found = new Map<string, number[]>();
  for (const [rank, tier] of Object.entries(incident.tiers)) {
    const name = TIERS[tier] ?? words(tier);
    const members = found.get(name);
    if (members) members.push(Number(rank));
    else found.set(name, [Number(rank)]);
  }
  return [...found].map(([tier, ranks]) => ({ tier, ranks })).sort((a, b) => b.ranks.length - a.ranks.length);
}

/** Evidence as text; a mapping as `key value` pairs. */
export function evidence(one: unknown): string {
  if (typeof one === "string") return one;
  if (typeof one !== "object" || one === null) return String(one);
  return Object.entries(one)
    .map(([key, value]) => `${words(key)} ${typeof value === "object" ? JSON.stringify(value) : String(value)}`)
    .join(" · ");
}
