/** Reads a job's log in pages, forwards and backwards, and follows its end. */

import { useCallback, useEffect, useRef, useState } from "react";

import { get } from "../../api/client";
import type { LogPage } from "../../api/types";
import { useLive, useLiveStatus } from "../../data";
import { appended, cut, EMPTY_LOG, prepended, query, type LogBuffer, type LogFilter } from "./logBuffer";

const PAGE = 500;
/** A search reads further pages until it has found this many lines. */
const MIN_FOUND = 100;
const POLL_MS = 3000;

export interface LogReader {
  buffer: LogBuffer;
  loading: boolean;
  error: string | null;
  /** The number of lines written while paused, matching or not. */
  missed: number;
  earlier: () => void;
  later: () => void;
  top: () => Promise<void>;
  end: () => Promise<void>;
}

export function useLogs(jobId: string, filter: LogFilter, paused: boolean): LogReader {
  const [buffer, setBuffer] = useState<LogBuffer>(EMPTY_LOG);
  const [loading, setLoading] = useState(true);
  const [error, setError] = useState<string | null>(null);
  const [newest, setNewest] = useState(0);
  const held = useRef(buffer);
  const busy = useRef<Promise<void> | null>(null);
  const stop = useRef(new AbortController());
  const filters = query(filter).toString();
  const { until } = filter;
  const open = until === null;

  const page = useCallback(
    async (more: Record<string, number>) => {
      const params = Object.fromEntries(new URLSearchParams(filters));
      const got = await get<LogPage>(
        `/jobs/${encodeURIComponent(jobId)}/logs`,
        { ...params, limit: PAGE, ...more },
        stop.current.signal,
      );
      return { ...got, first_line: got.first_line ?? null, next_cursor: got.next_cursor ?? null };
    },
    [jobId, filters],
  );
  const store = useCallback(
    (next: LogBuffer) => {
      held.current = cut(next, until);
      setBuffer(held.current);
    },
    [until],
  );
  /** Runs a request at a time; a call during a request returns that request. */
  const single = useCallback((work: () => Promise<void>): Promise<void> => {
    if (busy.current) return busy.current;
    const { signal } = stop.current;
    const run = work()
      .then(() => setError(null))
      .catch((problem: unknown) => {
        if (!signal.aborted) setError(problem instanceof Error ? problem.message : String(problem));
      })
      .finally(() => {
        if (busy.current === run) busy.current = null;
        if (!signal.aborted) setLoading(false);
      });
    busy.current = run;
    return run;
  }, []);

  /** Reads lines before `from` (null: the last lines) until enough are found or none are left. */
  const readBackward = useCallback(
    async (from: number | null) => {
      const { signal } = stop.current;
      let got = await page(from === null ? { tail: PAGE } : { before: from });
      let lines = got.items;
      const { last_line } = got;
      while (lines.length < MIN_FOUND && got.first_line !== null && !signal.aborted) {
        got = await page({ before: got.first_line });
        lines = [...got.items, ...lines];
      }
      return { lines, before: got.first_line, seen: last_line };
    },
    [page],
  );
  /** Reads lines after `from` until enough are found or none are left. */
  const readForward = useCallback(
    async (from: number) => {
      const { signal } = stop.current;
      let got = await page({ after: from });
      let lines = got.items;
      while (lines.length < MIN_FOUND && got.next_cursor && !signal.aborted) {
        got = await page({ after: got.last_line });
        lines = [...lines, ...got.items];
      }
      return { lines, more: got.next_cursor !== null, seen: got.last_line };
    },
    [page],
  );
  const top = useCallback(
    () =>
      single(async () => {
        const got = await readForward(0);
        store({ lines: got.lines, before: null, moreAfter: got.more, seen: got.seen });
      }),
    [single, readForward, store],
  );
  const end = useCallback(
    () =>
      single(async () => {
        const got = await readBackward(null);
        store({ ...got, moreAfter: false });
      }),
    [single, readBackward, store],
  );
  const earlier = useCallback(() => {
    const { before } = held.current;
    if (before === null || busy.current) return;
    void single(async () => {
      const got = await readBackward(before);
      store(prepended(held.current, got.lines, got.before));
    });
  }, [single, readBackward, store]);
  const later = useCallback(() => {
    if (busy.current) return;
    void single(async () => {
      const before = held.current;
      const got = await readForward(before.seen);
      store(appended(before, got.lines, got.seen, got.more));
    });
  }, [single, readForward, store]);

  useEffect(() => {
    stop.current = new AbortController();
    busy.current = null;
    setLoading(true);
    void (open ? end() : top());
    const mine = stop.current;
    return () => mine.abort();
  }, [open, end, top]);

  const streaming = useLiveStatus().state === "live";
  useLive("logs", ({ last_line }) => {
    setNewest(last_line);
    if (!paused && open && !held.current.moreAfter) later();
  });
  useEffect(() => {
    if (paused || !open) return;
    if (held.current.seen > 0 && !held.current.moreAfter) later();
    if (streaming) return;
    const timer = setInterval(() => !document.hidden && later(), POLL_MS);
    return () => clearInterval(timer);
  }, [streaming, paused, open, later]);

  const missed = paused && open ? Math.max(0, newest - buffer.seen) : 0;
  return { buffer, loading, error, missed, earlier, later, top, end };
}
