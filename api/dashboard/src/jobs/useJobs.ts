/** The jobs that match the filters: loaded page by page while scrolling, and updated in place by the
 * live stream. */

import { useCallback, useEffect, useRef, useState } from "react";
import { get } from "../api/client";
import type { JobRow, JobRowPage } from "../api/types";
import { useLive, useLiveStatus, useThrottled } from "../data";
import { useShared } from "../data/context";
import { queryOf, type Filters } from "./filters";
import { EMPTY, appended, changed, first, type List } from "./list";

const PAGE = 200;
/** Changed rows are collected for this time before the list is rendered again. */
const DRAW_MS = 150;
const COUNT_MS = 3000;
const POLL_MS = 5000;

export interface Jobs {
  list: List;
  loading: boolean;
  error: Error | null;
  /** Loads rows until the list has this many, or all. */
  ensureRows: (rows: number) => void;
  reload: () => void;
}

export function useJobs(filters: Filters): Jobs {
  const { cache } = useShared();
  const key = `jobs ${JSON.stringify(queryOf(filters))}`;
  const [held, setHeld] = useState<{ key: string; list: List | null; error: Error | null }>({ key, list: null, error: null });
  const newest = useRef({ key, filters, held });
  newest.current = { key, filters, held };
  const loadingMore = useRef(false);
  const wanted = useRef(0);

  const store = useCallback((forKey: string, list: List) => {
    if (newest.current.key !== forKey) return;
    cache.set(forKey, list);
    newest.current.held = { key: forKey, list, error: null };
    setHeld(newest.current.held);
  }, [cache]);

  const load = useCallback(async (cursor: string | null) => {
    const wantedList = newest.current;
    const limit = cursor === null ? Math.min(500, Math.max(PAGE, wantedList.held.list?.rows.length ?? 0)) : PAGE;
    try {
      const page = await get<JobRowPage>("/jobs", { ...queryOf(wantedList.filters), limit, cursor });
      const { held: now } = newest.current;
      store(wantedList.key, cursor === null || !now.list ? first(page) : appended(now.list, page));
      return true;
    } catch (error) {
      if (newest.current.key === wantedList.key) setHeld({ ...newest.current.held, key: wantedList.key, error: error as Error });
      return false;
    }
  }, [store]);

  const more = useCallback(async () => {
    if (loadingMore.current) return;
    loadingMore.current = true;
    try {
      for (;;) {
        const { held: now, key: nowKey } = newest.current;
        if (!now.list || now.key !== nowKey || now.list.rows.length >= wanted.current || now.list.next_cursor === null) return;
        if (!(await load(now.list.next_cursor))) return;
      }
    } finally {
      loadingMore.current = false;
    }
  }, [load]);

  const ensureRows = useCallback((rows: number) => {
    wanted.current = rows;
    void more();
  }, [more]);

  useEffect(() => {
    wanted.current = 0;
    const list = cache.get(key)?.value as List | undefined;
    newest.current.held = { key, list: list ?? newest.current.held.list, error: null };
    setHeld(newest.current.held);
    void load(null);
  }, [cache, key, load]);

  const reload = useCallback(() => void load(null), [load]);
  useRowUpdates(newest, store);
  const recount = useThrottled(() => void loadCounts(newest, store), COUNT_MS);
  useLive("row", recount);
  useLive("begun", reload);
  const streaming = useLiveStatus().state === "live";
  useEffect(() => {
    if (streaming) return;
    const timer = setInterval(reload, POLL_MS);
    return () => clearInterval(timer);
  }, [streaming, reload]);

  return { list: held.list ?? EMPTY, loading: held.list === null && held.error === null, error: held.error, ensureRows, reload };
}

type Newest = { current: { key: string; filters: Filters; held: { key: string; list: List | null } } };
type Store = (forKey: string, list: List) => void;

/** Applies rows from the stream, rendered together. */
function useRowUpdates(newest: Newest, store: Store): void {
  const changedRows = useRef(new Map<string, JobRow>());
  const draw = useThrottled(() => {
    const { key, filters, held } = newest.current;
    if (!held.list) return;
    let list = held.list;
    for (const row of changedRows.current.values()) list = changed(list, row, filters);
    changedRows.current.clear();
    if (list !== held.list) store(key, list);
  }, DRAW_MS);
  useLive("row", (row) => {
    changedRows.current.set(row.id, row);
    draw();
  });
}

/** Loads the counts from the server: they include the jobs that are not loaded here. */
async function loadCounts(newest: Newest, store: Store): Promise<void> {
  const { key, filters } = newest.current;
  try {
    const page = await get<JobRowPage>("/jobs", { ...queryOf(filters), limit: 1 });
    const { list } = newest.current.held;
    if (list && newest.current.key === key) store(key, { ...list, total: page.total, counts: page.counts });
  } catch {
    // The next change asks again; the stream reports an unreachable server.
  }
}
