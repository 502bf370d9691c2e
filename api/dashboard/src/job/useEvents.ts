/** The events of a job: the newest first to be read, earlier ones when they are wanted. */

import { useCallback, useEffect, useRef, useState } from "react";

import { get } from "../api/client";
import { useLive } from "../data";
import type { JobEvent } from "./views";

const PAGE = 1000;

export interface Events {
  /** Ascending, without gaps. */
  events: readonly JobEvent[];
  more: boolean;
  loading: boolean;
  error: string | null;
  earlier: () => void;
}

/** `newest`: number of the job's newest event; `since`: read back so far by itself. */
export function useEvents(jobId: string, newest: number, since: number | null): Events {
  const [events, setEvents] = useState<readonly JobEvent[]>([]);
  const [loading, setLoading] = useState(false);
  const [error, setError] = useState<string | null>(null);
  const held = useRef(events);
  held.current = events;
  const busy = useRef(false);
  const begun = useRef(newest);
  begun.current = Math.max(newest, begun.current);

  const read = useCallback(
    async (after: number, limit: number) => {
      if (busy.current) return;
      busy.current = true;
      setLoading(true);
      try {
        const page = await get<{ events: JobEvent[] }>(
          `/jobs/${encodeURIComponent(jobId)}/events`,
          { after, limit },
        );
        setEvents((old) => joined(old, page.events));
        setError(null);
      } catch (problem) {
        setError(problem instanceof Error ? problem.message : String(problem));
      } finally {
        busy.current = false;
        setLoading(false);
      }
    },
    [jobId],
  );
  useEffect(() => {
    setEvents([]);
    void read(Math.max(0, begun.current - PAGE), PAGE);
  }, [read]);
  const more = (events[0]?.seq ?? 1) > 1;
  const earlier = useCallback(() => {
    const first = held.current[0]?.seq ?? 1;
    if (first > 1) void read(Math.max(0, first - 1 - PAGE), Math.min(PAGE, first - 1));
  }, [read]);
  useEffect(() => {
    const first = events[0];
    if (since !== null && first && first.at > since && more && !loading) earlier();
  }, [since, events, more, loading, earlier]);
  useLive("event", (event) => {
    const last = held.current[held.current.length - 1]?.seq ?? 0;
    if (event.seq === last + 1) setEvents((old) => joined(old, [event as JobEvent]));
    else if (event.seq > last && held.current.length) void read(last, PAGE);
  });
  return { events, more, loading, error, earlier };
}

/** Both in order, each once. */
export function joined(old: readonly JobEvent[], news: readonly JobEvent[]): readonly JobEvent[] {
  if (!news.length) return old;
  const first = old[0]?.seq ?? Infinity;
  const last = old[old.length - 1]?.seq ?? 0;
  return [
    ...news.filter((one) => one.seq < first),
    ...old,
    ...news.filter((one) => one.seq > last && one.seq >= first),
  ];
}
