/** Loads the events of a job: the newest first, earlier events on request. */

import { useState } from "react";

import { get } from "../../api/client";
import type { EventPage, EventView } from "../../api/types";
import { jobPath, useFurtherPage, useLive, useResource } from "../../data";

const PAGE = 1000;

export interface Events {
  /** Ascending, without gaps. */
  events: readonly EventView[];
  more: boolean;
  loading: boolean;
  error: Error | null;
  earlier: () => void;
}

/** `newest`: number of the job's newest event; `since`: the time back to which events load by
 * themselves. */
export function useEvents(jobId: string, newest: number, since: number | null): Events {
  const read = async (after: number, limit: number, signal: AbortSignal) =>
    (await get<EventPage>(jobPath(jobId, "/events"), { after, limit }, signal)).items;
  const found = useResource<readonly EventView[]>(`events ${jobId}`, async (signal, held) => {
    const after = held()?.at(-1)?.seq ?? Math.max(0, newest - PAGE);
    const page = await read(after, PAGE, signal);
    return joined(held() ?? [], page); // the stream may have added events meanwhile
  });
  const events = found.value ?? NO_EVENTS;
  const first = events[0]?.seq ?? 1;
  const [asked, setAsked] = useState(0);
  const more = first > 1;
  const wanted = more && (asked === first || (since !== null && events[0]!.at > since));
  const further = useFurtherPage(
    wanted ? `events ${jobId} ${first}` : null,
    (signal) => read(Math.max(0, first - 1 - PAGE), Math.min(PAGE, first - 1), signal),
    (page) => found.set((held) => held && joined(held, page)),
  );
  useLive("event", (event) => {
    let gap = false;
    found.set((held) => {
      const last = held ? (held.at(-1)?.seq ?? 0) : Infinity;
      gap = event.seq > last + 1;
      return held && event.seq === last + 1 ? joined(held, [event]) : held;
    });
    if (gap) void found.reload();
  });
  return {
    events,
    more,
    loading: found.loading || further.loading,
    error: found.error ?? further.error,
    earlier: () => setAsked(first),
  };
}

const NO_EVENTS: readonly EventView[] = [];

/** Both lists in order, without duplicates. */
export function joined(old: readonly EventView[], news: readonly EventView[]): readonly EventView[] {
  if (!news.length) return old;
  const first = old[0]?.seq ?? Infinity;
  const last = old[old.length - 1]?.seq ?? 0;
  return [
    ...news.filter((event) => event.seq < first),
    ...old,
    ...news.filter((event) => event.seq > last && event.seq >= first),
  ];
}
