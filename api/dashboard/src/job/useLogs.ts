/** A job's log as it is read in pieces, forwards and backwards, and followed. */

import { useCallback, useEffect, useRef, useState } from "react";

import { get } from "../api/client";
import { useLive, useLiveStatus } from "../data";
import { appended, cut, EMPTY, prepended, query, type LogBuffer, type LogFilter } from "./logBuffer";
import type { LogPage } from "./views";

const PAGE = 500;
/** A search that finds little is gone on with until it has found so many. */
const ENOUGH = 100;
const WITHOUT_STREAM_MS = 3000;

export interface Logs {
  buffer: LogBuffer;
  loading: boolean;
  error: string | null;
  /** Lines that came while paused, matching or not. */
  missed: number;
  earlier: () => void;
  later: () => void;
  top: () => Promise<void>;
  end: () => Promise<void>;
}

/** `shifted`: rows came before those that are held, or (negative) left there. */
export function useLogs(
  jobId: string,
  filter: LogFilter,
  paused: boolean,
  shifted: (rows: number) => void,
): Logs {
  const [buffer, setBuffer] = useState<LogBuffer>(EMPTY);
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
      return { ...got, first_line: got.first_line ?? null };
    },
    [jobId, filters],
  );
  const take = useCallback(
    (next: LogBuffer) => {
      held.current = cut(next, until);
      setBuffer(held.current);
    },
    [until],
  );
  /** One request at a time; who asks meanwhile is not served. */
  const only = useCallback((work: () => Promise<void>): Promise<void> => {
    if (busy.current) return busy.current;
    const mine = stop.current.signal;
    const run = work()
      .then(() => setError(null))
      .catch((problem: unknown) => {
        if (!mine.aborted) setError(problem instanceof Error ? problem.message : String(problem));
      })
      .finally(() => {
        if (busy.current === run) busy.current = null;
        if (!mine.aborted) setLoading(false);
      });
    busy.current = run;
    return run;
  }, []);

  /** Lines before `before` (null: the last ones), until there are some or there are no more. */
  const back = useCallback(
    async (from: number | null) => {
      const mine = stop.current.signal;
      let got = await page(from === null ? { tail: PAGE } : { before: from });
      let lines = got.lines;
      const { last_line } = got;
      while (lines.length < ENOUGH && got.first_line !== null && !mine.aborted) {
        got = await page({ before: got.first_line });
        lines = [...got.lines, ...lines];
      }
      return { lines, before: got.first_line, seen: last_line };
    },
    [page],
  );
  const forth = useCallback(
    async (from: number) => {
      const mine = stop.current.signal;
      let got = await page({ after: from });
      let lines = got.lines;
      while (lines.length < ENOUGH && got.more && !mine.aborted) {
        got = await page({ after: got.last_line });
        lines = [...lines, ...got.lines];
      }
      return { lines, more: got.more, seen: got.last_line };
    },
    [page],
  );
  const top = useCallback(
    () =>
      only(async () => {
        const got = await forth(0);
        take({ lines: got.lines, before: null, moreAfter: got.more, seen: got.seen });
      }),
    [only, forth, take],
  );
  const end = useCallback(
    () =>
      only(async () => {
        const got = await back(null);
        take({ ...got, moreAfter: false });
      }),
    [only, back, take],
  );
  const earlier = useCallback(() => {
    const { before } = held.current;
    if (before === null || busy.current) return;
    void only(async () => {
      const got = await back(before);
      take(prepended(held.current, got.lines, got.before));
      shifted(got.lines.length);
    });
  }, [only, back, take, shifted]);
  const later = useCallback(() => {
    if (busy.current) return;
    void only(async () => {
      const before = held.current;
      const got = await forth(before.seen);
      const after = appended(before, got.lines, got.seen, got.more);
      take(after);
      const left = before.lines.findIndex((one) => one.line === after.lines[0]?.line);
      if (left > 0) shifted(-left);
    });
  }, [only, forth, take, shifted]);

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
    const timer = setInterval(() => !document.hidden && later(), WITHOUT_STREAM_MS);
    return () => clearInterval(timer);
  }, [streaming, paused, open, later]);

  const missed = paused && open ? Math.max(0, newest - buffer.seen) : 0;
  return { buffer, loading, error, missed, earlier, later, top, end };
}
