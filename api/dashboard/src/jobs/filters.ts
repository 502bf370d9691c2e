/** The filters of the list of jobs: read from the URL, sent to the API, applied to changed rows. */

import type { Query } from "../api/client";
import { STATES, type JobRow, type State } from "../api/types";

export const SORTS = { created: "Newest first", name: "By name", state: "By state", goodput: "Worst goodput first" } as const;
export type Sort = keyof typeof SORTS;

export interface Filters {
  q: string;
  states: readonly State[];
  owner: string | null;
  sort: Sort;
}

export function filtersOf(params: URLSearchParams): Filters {
  const sort = params.get("sort");
  return {
    q: params.get("q") ?? "",
    states: params.getAll("state").map((state) => state.toUpperCase()).filter((state): state is State => STATES.includes(state as State)),
    owner: params.get("owner"),
    sort: sort !== null && sort in SORTS ? (sort as Sort) : "created",
  };
}

export const queryOf = ({ q, states, owner, sort }: Filters): Query => ({
  q, state: states, owner, sort,
});

/** Applies the same rule as the server: a part of the name or owner, or the start or end of the id. */
export function matches(row: JobRow, { q, states, owner }: Filters): boolean {
  if (states.length > 0 && !states.includes(row.state)) return false;
  if (owner !== null && row.owner !== owner) return false;
  const text = q.toLowerCase();
  return text === "" || row.id.startsWith(text) || row.id.endsWith(text) || [row.name, row.owner ?? ""].some((field) => field.toLowerCase().includes(text));
}
