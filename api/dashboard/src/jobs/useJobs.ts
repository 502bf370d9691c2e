/** The jobs that the filters let through: read page by page as they are scrolled to, and changed in
 * place by the live stream. */

import { useCallback, useEffect, useRef, useState } from "react";
import { get } from "../api/client";
import type { JobRow, JobRowPage } from "../api/types";
import { useLive, useLiveStatus, useThrottled } from "../data";
import { useShared } from "../data/context";
import { queryOf, type Filters } from "./filters";
import { EMPTY, appended, changed, first, type List } from "./list";

const PAGE = 200;
/** How long rows that changed are collected before the list is drawn again. */
const DRAW_MS = 150;
const COUNT_MS = 3000;
const WITHOUT_STREAM_MS = 5000;

export interface Jobs {
  list: List;
  loading: boolean;
  error: Error | null;
  /** See to it that so many rows are there, or all. */
  want: (rows: number) => void;
  reload: () => void;
}

export function useJobs(filters: Filters): Jobs {
  const { cache } = useShared();
  const key = `jobs ${JSON.stringify(queryOf(filters))}`;
  const [held, setHeld] = useState<{ key: string; list: List | null; error: Error | null }>({ key, list: null, error: null });
  const newest = useRef({ key, filters, held });
  newest.current = { key, filters, held };
  const reading = useRef(false);
  const wanted = useRef(0);

  const put = useCallback((of: string, list: List) => {
    if (newest.current.key !== of) return;
    cache.set(of, list);
    newest.current.held = { key: of, list, error: null };
    setHeld(newest.current.held);
  }, [cache]);

  const read = useCallback(async (cursor: string | null) => {
    const asked = newest.current;
    const limit = cursor === null ? Math.min(500, Math.max(PAGE, asked.held.list?.rows.length ?? 0)) : PAGE;
    try {
      const page = await get<JobRowPage>("/jobs", { ...queryOf(asked.filters), limit, cursor });
      const { held: now } = newest.current;
      put(asked.key, cursor === null || !now.list ? first(page) : appended(now.list, page));
      return true;
    } catch (error) {
      if (newest.current.key === asked.key) setHeld({ ...newest.current.held, key: asked.key, error: error as Error });
      return false;
    }
  }, [put]);

  const more = useCallback(async () => {
    if (reading.current) return;
    reading.current = true;
    try {
      for (;;) {
        const { held: now, key: of } = newest.current;
        if (!now.list || now.key !== of || now.list.rows.length >= wanted.current || now.list.next_cursor === null) return;
        if (!(await read(now.list.next_cursor))) return;
      }
    } finally {
      reading.current = false;
    }
  }, [read]);

  const want = useCallback((rows: number) => {
    wanted.current = rows;
    void more();
  }, [more]);

  useEffect(() => {
    wanted.current = 0;
    const list = cache.get(key)?.value as List | undefined;
    newest.current.held = { key, list: list ?? newest.current.held.list, error: null };
    setHeld(newest.current.held);
    void read(null);
  }, [cache, key, read]);

  const reload = useCallback(() => void read(null), [read]);
  useTold(newest, put);
  const recount = useThrottled(() => void counted(newest, put), COUNT_MS);
  useLive("row", recount);
  useLive("begun", reload);
  const streaming = useLiveStatus().state === "live";
  useEffect(() => {
    if (streaming) return;
    const timer = setInterval(reload, WITHOUT_STREAM_MS);
    return () => clearInterval(timer);
  }, [streaming, reload]);

  return { list: held.list ?? EMPTY, loading: held.list === null && held.error === null, error: held.error, want, reload };
}

type Newest = { current: { key: string; filters: Filters; held: { key: string; list: List | null } } };
type Put = (of: string, list: List) => void;

/** Rows that the stream tells of, drawn together. */
function useTold(newest: Newest, put: Put): void {
  const told = useRef(new Map<string, JobRow>());
  const draw = useThrottled(() => {
    const { key, filters, held } = newest.current;
    if (!held.list) return;
    let list = held.list;
    for (const row of told.current.values()) list = changed(list, row, filters);
    told.current.clear();
    if (list !== held.list) put(key, list);
  }, DRAW_MS);
  useLive("row", (row) => {
    told.current.set(row.id, row);
    draw();
  });
}

/** Counts are of all jobs, also of those that are not loaded: the server's are right. */
async function counted(newest: Newest, put: Put): Promise<void> {
  const { key, filters } = newest.current;
  try {
    const page = await get<JobRowPage>("/jobs", { ...queryOf(filters), limit: 1 });
    const { list } = newest.current.held;
    if (list && newest.current.key === key) put(key, { ...list, total: page.total, counts: page.counts });
  } catch {
    // The next change asks again; a server that is away is told of by the stream.
  }
}
