/** The end of a job in a line of the list: why it ended, and what it went through. Pure. */

import { ended, type JobRow } from "../api/types";
import { count, duration, plural, roughly } from "../format";

export interface Ending {
  /** "all 10,000 steps", "out of failures at step 812 of 10,000". */
  outcome: string;
  /** "took 12m 14s · ended 3h ago". */
  times: string;
  /** "2 incidents": faults, and changes of the size. */
  incidents: string;
}

/** Null while the job has not ended. */
export function endingOf(row: JobRow, now: number): Ending | null {
  if (!ended(row.state) || row.ended_at === null) return null;
  const age = roughly(now - row.ended_at);
  return {
    outcome: outcomeOf(row),
    times: `${row.started_at === null ? "" : `took ${duration(row.ended_at - row.started_at)} · `}ended ${age === "now" ? "just now" : `${age} ago`}`,
    incidents: incidentsOf(row),
  };
}

function outcomeOf(row: JobRow): string {
  const { state, step, steps } = row;
  const reached = step === null ? "" : steps === null ? `step ${count(step)}` : `step ${count(step)} of ${count(steps)}`;
  if (row.outcome_code === "stopped_early") return `stopped early at ${reached}`;
  if (state === "SUCCEEDED") return step === null ? "completed" : steps !== null && step >= steps ? `all ${count(steps)} steps` : `completed at ${reached}`;
  const why = state === "FAILED" ? (row.outcome_code ?? "failed").replaceAll("_", " ") : "cancelled";
  if (row.started_at === null) return `${why} before it started`;
  if (step === null) return why; // it has reported none
  return step > 0 ? `${why} at ${reached}` : `${why} before its first step`;
}

const incidentsOf = ({ incidents }: JobRow): string => (incidents === 0 ? "no incidents" : plural(incidents, "incident"));

/** Whether a goodput asks for attention. That of a job that has just started says nothing yet. */
export const isLow = ({ goodput, goodput_settled }: JobRow): boolean => goodput_settled && goodput !== null && goodput < 0.9;
