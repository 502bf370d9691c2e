/** The rows that are known of a list, in the server's order. Pure values. */

import type { JobRow, JobRowPage, State } from "../api/types";
import { matches, type Filters } from "./filters";

export interface List {
  rows: readonly JobRow[];
  next_cursor: string | null;
  total: number;
  counts: Partial<Record<State, number>>;
}

export const EMPTY: List = { rows: [], next_cursor: null, total: 0, counts: {} };

export const first = (page: JobRowPage): List => ({ ...page });

/** One that was told of meanwhile may be in the next page too: it is kept once. */
export function appended(list: List, page: JobRowPage): List {
  const known = new Set(list.rows.map((row) => row.id));
  return { ...page, rows: [...list.rows, ...page.rows.filter((row) => !known.has(row.id))] };
}

/** A stream and a page may cross: the newer of the two stays. */
export const newer = (one: JobRow, than: JobRow): boolean =>
  one.event_seq > than.event_seq || (one.event_seq === than.event_seq && one.step >= than.step);

/** `row` has changed. A new job comes first in a list that is sorted so; elsewhere its place is not
 * known, and it is shown when the list is read again. */
export function changed(list: List, row: JobRow, filters: Filters): List {
  const at = list.rows.findIndex((one) => one.id === row.id);
  const before = list.rows[at];
  if (before) {
    if (!newer(row, before)) return list;
    const rows = list.rows.slice();
    rows[at] = row;
    return { ...list, rows, counts: moved(list.counts, before.state, row.state) };
  }
  const newest = list.rows[0];
  if (filters.sort !== "created" || !matches(row, filters)) return list;
  if (newest && row.created_at <= newest.created_at) return list;
  return { ...list, rows: [row, ...list.rows], total: list.total + 1, counts: moved(list.counts, null, row.state) };
}

function moved(counts: List["counts"], from: State | null, to: State): List["counts"] {
  if (from === to) return counts;
  const left = from === null ? {} : { [from]: Math.max(0, (counts[from] ?? 1) - 1) };
  return { ...counts, ...left, [to]: (counts[to] ?? 0) + 1 };
}
