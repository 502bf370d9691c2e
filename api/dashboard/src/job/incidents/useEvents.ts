/** Loads the events of a job: the newest first, earlier events on request. */

import { useCallback, useEffect, useRef, useState } from "react";

import { get } from "../../api/client";
import { useLive } from "../../data";
import type { JobEvent } from "../views";

const PAGE = 1000;

export interface Events {
  /** Ascending, without gaps. */
  events: readonly JobEvent[];
  more: boolean;
  loading: boolean;
  error: string | null;
  earlier: () => void;
}

/** `newest`: number of the job's newest event; `since`: the time back to which events load by
 * themselves. */
export function useEvents(jobId: string, newest: number, since: number | null): Events {
  const [events, setEvents] = useState<readonly JobEvent[]>([]);
  const [loading, setLoading] = useState(false);
  const [error, setError] = useState<string | null>(null);
  const held = useRef(events);
  held.current = events;
  const busy = useRef(false);
  const newestSeen = useRef(newest);
  newestSeen.current = Math.max(newest, newestSeen.current);

  const load = useCallback(
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
    void load(Math.max(0, newestSeen.current - PAGE), PAGE);
  }, [load]);
  const more = (events[0]?.seq ?? 1) > 1;
  const earlier = useCallback(() => {
    const first = held.current[0]?.seq ?? 1;
    if (first > 1) void load(Math.max(0, first - 1 - PAGE), Math.min(PAGE, first - 1));
  }, [load]);
  useEffect(() => {
    const first = events[0];
    if (since !== null && first && first.at > since && more && !loading) earlier();
  }, [since, events, more, loading, earlier]);
  useLive("event", (event) => {
    const last = held.current[held.current.length - 1]?.seq ?? 0;
    if (event.seq === last + 1) setEvents((old) => joined(old, [event as JobEvent]));
    else if (event.seq > last && held.current.length) void load(last, PAGE);
  });
  return { events, more, loading, error, earlier };
}

/** Both lists in order, without duplicates. */
export function joined(old: readonly JobEvent[], news: readonly JobEvent[]): readonly JobEvent[] {
  if (!news.length) return old;
  const first = old[0]?.seq ?? Infinity;
  const last = old[old.length - 1]?.seq ?? 0;
  return [
    ...news.filter((event) => event.seq < first),
    ...old,
    ...news.filter((event) => event.seq > last && event.seq >= first),
  ];
}
