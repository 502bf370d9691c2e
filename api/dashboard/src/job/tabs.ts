/** The tabs of a job's page. Each has an address of its own. Pure. */

import type { JobView } from "../api/types";
import { isProgram } from "./level";

export const TABS = ["overview", "charts", "ranks", "incidents", "logs", "checkpoints", "events", "spec"] as const;
export type Tab = (typeof TABS)[number];

const NAMES: Record<Tab, string> = {
  overview: "Overview", charts: "Charts", ranks: "Ranks", incidents: "Incidents",
  logs: "Log", checkpoints: "Checkpoints", events: "Events", spec: "Spec",
};
/** What a user's program has: processes that write an output. */
const NAMES_OF_PROGRAM: Partial<Record<Tab, string>> = { ranks: "Processes", logs: "Output" };

/** The tabs that show what lies in the selected interval: the time ribbon is above them. */
export const IN_TIME: ReadonlySet<Tab> = new Set<Tab>(["overview", "charts", "ranks", "incidents", "logs", "events"]);

/** The tab of the last part of a path; null: there is no such tab. */
export function tabOf(part: string | undefined): Tab | null {
  if (part === undefined) return "overview";
  return part !== "overview" && (TABS as readonly string[]).includes(part) ? (part as Tab) : null;
}

export const tabName = (tab: Tab, job: Pick<JobView, "brings">): string =>
  (isProgram(job) ? NAMES_OF_PROGRAM[tab] : undefined) ?? NAMES[tab];

/** What stays selected while the tabs change. */
const KEPT = ["from", "to", "axis", "of", "order", "against"];

/** The address of a tab; `search` is the present query. */
export function tabPath(id: string, tab: Tab, search: string, changes: Record<string, string> = {}): string {
  const present = new URLSearchParams(search);
  const query = new URLSearchParams(KEPT.flatMap((key) => (present.has(key) ? [[key, present.get(key)!]] : [])));
  for (const [key, value] of Object.entries(changes)) query.set(key, value);
  const path = `/jobs/${encodeURIComponent(id)}${tab === "overview" ? "" : `/${tab}`}`;
  return query.size ? `${path}?${query}` : path;
}
