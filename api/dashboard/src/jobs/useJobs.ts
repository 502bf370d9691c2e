/** The jobs that match the filters: loaded page by page while scrolling, and updated in place by the
 * live stream. */

import { useRef, useState } from "react";
import { get } from "../api/client";
import type { JobRow, JobPage } from "../api/types";
import { useFurtherPage, useLast, useLive, useResource, useThrottled, type Resource } from "../data";
import { queryOf, type Filters } from "./filters";
import { changed, EMPTY_LIST, first, without, withPage, type JobList } from "./list";

const PAGE = 200;
const MOST_ROWS = 500;
/** Changed rows are collected for this time before the list is rendered again. */
const DRAW_MS = 150;
const COUNT_MS = 3000;

export interface Jobs {
  list: JobList;
  loading: boolean;
  error: Error | null;
  /** Loads rows until the list has this many, or all. */
  ensureRows: (rows: number) => void;
  reload: () => void;
}

export function useJobs(filters: Filters): Jobs {
  const query = queryOf(filters);
  const key = `jobs ${JSON.stringify(query)}`;
  const read = (limit: number, cursor: string | null, signal?: AbortSignal) =>
    get<JobPage>("/jobs", { ...query, limit, cursor }, signal);
  const found = useResource<JobList>(key, async (signal, held) =>
    first(await read(Math.min(MOST_ROWS, Math.max(PAGE, held()?.rows.length ?? 0)), null, signal)),
  );
  const { value, set } = found;
  const [wanted, ensureRows] = useState(0);
  const cursor = value && value.rows.length < wanted ? value.next_cursor : null;
  const further = useFurtherPage(
    cursor === null ? null : `${key} ${cursor}`,
    (signal) => read(PAGE, cursor, signal),
    (page) => set((held) => (held?.next_cursor === cursor ? withPage(held, page) : held)),
  );
  useRowUpdates(filters, set);
  /** The counts include the jobs that are not loaded here. */
  const recount = useThrottled(() => {
    void read(1, null).then(
      ({ total, counts }) => set((held) => held && { ...held, total, counts }),
      () => {}, // the next change counts again; the stream reports an unreachable server
    );
  }, COUNT_MS);
  useLive("row", recount);
  useLive("removed", ({ id }) => {
    set((held) => held && without(held, id));
    recount();
  });
  const list = useLast(value);
  const error = found.error ?? further.error;
  return { list: list ?? EMPTY_LIST, loading: !list && !error, error, ensureRows, reload: () => void found.reload() };
}

/** Applies rows from the stream, rendered together. */
function useRowUpdates(filters: Filters, set: Resource<JobList>["set"]): void {
  const rows = useRef(new Map<string, JobRow>());
  const draw = useThrottled(() => {
    const news = [...rows.current.values()];
    rows.current.clear();
    set((held) => held && news.reduce((list, row) => changed(list, row, filters), held));
  }, DRAW_MS);
  useLive("row", (row) => {
    rows.current.set(row.id, row);
    draw();
  });
}
