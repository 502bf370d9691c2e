/** The loaded rows of the list of jobs, in the server's order. Pure. */

import type { JobRow, JobPage, State } from "../api/types";
import { matches, type Filters } from "./filters";

export interface JobList {
  rows: readonly JobRow[];
  next_cursor: string | null;
  total: number;
  counts: Partial<Record<State, number>>;
}

export const EMPTY_LIST: JobList = { rows: [], next_cursor: null, total: 0, counts: {} };

export const first = ({ items, next_cursor, total, counts }: JobPage): JobList => ({
  rows: items, next_cursor: next_cursor ?? null, total, counts,
});

/** Appends a page without duplicates: the stream may have added a row of that page already. */
export function withPage(list: JobList, page: JobPage): JobList {
  const known = new Set(list.rows.map((row) => row.id));
  return { ...first(page), rows: [...list.rows, ...page.items.filter((row) => !known.has(row.id))] };
}

/** Whether `row` is as new as `other`. A stream and a page may cross; the newer row stays. */
export const isNewer = (row: JobRow, other: JobRow): boolean =>
  row.event_seq > other.event_seq || (row.event_seq === other.event_seq && (row.step ?? 0) >= (other.step ?? 0));

/** Applies a changed row. A new job comes first in a list sorted by creation; in other orders its
 * place is unknown, and it appears when the list is loaded again. */
export function changed(list: JobList, row: JobRow, filters: Filters): JobList {
  const at = list.rows.findIndex((listed) => listed.id === row.id);
  const before = list.rows[at];
  if (before) {
    if (!isNewer(row, before)) return list;
    const rows = list.rows.slice();
    rows[at] = row;
    return { ...list, rows, counts: movedCounts(list.counts, before.state, row.state) };
  }
  const newest = list.rows[0];
  if (filters.sort !== "created" || !matches(row, filters)) return list;
  if (newest && row.created_at <= newest.created_at) return list;
  return { ...list, rows: [row, ...list.rows], total: list.total + 1, counts: movedCounts(list.counts, null, row.state) };
}

export function without(list: JobList, id: string): JobList {
  const rows = list.rows.filter((row) => row.id !== id);
  return rows.length === list.rows.length ? list : { ...list, rows };
}

function movedCounts(counts: JobList["counts"], from: State | null, to: State): JobList["counts"] {
  if (from === to) return counts;
  const left = from === null ? {} : { [from]: Math.max(0, (counts[from] ?? 1) - 1) };
  return { ...counts, ...left, [to]: (counts[to] ?? 0) + 1 };
}
