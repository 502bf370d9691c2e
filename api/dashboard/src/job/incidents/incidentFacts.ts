/** The sentences, costs and phase bars of an incident. Pure. A phase that it does not know is shown by its name. */

import type { IncidentView, SpanKind } from "../../api/types";
import { fineDuration, ranges, whole, type NodeIdShortener } from "../format";
import { humanize, PHASES } from "./kinds";

/** Whether nothing failed: the world was only to have another mesh. */
export const isResize = (incident: IncidentView): boolean => incident.cause === "resize";

/** The heading of a card: "A node was lost", "The world grew from 6 to 8 ranks". */
export const title = ({ title }: IncidentView): string => title.charAt(0).toUpperCase() + title.slice(1);

/** The server's sentences about one subject. */
export function sentences(incident: IncidentView, about: IncidentView["text"][number]["about"]): string[] {
  return incident.text.filter((part) => part.about === about).map((part) => part.text);
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

/** Seconds from the first signal to the first step of the next attempt; null while the incident is open. */
export function total(incident: IncidentView): number | null {
  const measured = incident.phases_s["total"];
  if (measured != null) return measured;
  if (incident.closed_at === null) return null;
  return incident.closed_at - (incident.signalled_at ?? incident.opened_at);
}

/** What ended the incident. A program that reports no steps is only seen to run again. */
function endOf(incident: IncidentView): string {
  if (incident.end_code) return "the job ended";
  return incident.level < 3 && incident.restored_step === null ? "the program ran again" : "the first step of the next attempt";
}

/** The costs, each as a value and its label; no entry for a cost that is zero or unknown. */
export function costs(incident: IncidentView): { label: string; value: string }[] {
  const found: { label: string; value: string }[] = [];
  const took = total(incident);
  if (took !== null) found.push({ label: `until ${endOf(incident)}`, value: fineDuration(took) });
  const goesOn = incident.closed_at !== null && !incident.end_code;
  if (goesOn && incident.steps_lost != null) {
    const steps = incident.steps_lost;
    found.push({ label: steps === 1 ? "step to repeat" : "steps to repeat", value: whole(steps) });
  }
  if (incident.cost) found.push({ label: "lost", value: incident.cost });
  if (goesOn && incident.restored_step !== null) {
    found.push({ label: "step it went on from", value: whole(Math.max(0, incident.restored_step)) });
  }
  return found;
}

/** "rank 3", "ranks 0–7, 12". */
export function ranksText(ranks: readonly number[], most = 4): string {
  return `${ranks.length === 1 ? "rank" : "ranks"} ${ranges(ranks, most)}`;
}

/** Registers the node ids in all texts of the incidents that the cards show. */
export function learnNodeIds(ids: NodeIdShortener, incidents: readonly IncidentView[]): void {
  for (const { text } of incidents) ids.learn(JSON.stringify(text));
}
