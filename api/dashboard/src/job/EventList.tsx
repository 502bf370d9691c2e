/** All that happened to a job, the newest first. */

import { useMemo, useRef, useState } from "react";

import { within, type Window } from "./axis";
import { eventTone, eventWords } from "./eventWords";
import { clock, moment, whole } from "./format";
import { useEvents } from "./useEvents";
import { VirtualList, type ListHandle } from "./VirtualList";
import type { JobEvent } from "./views";

const ROW = 28;

export function EventList({ jobId, newest, window }: { jobId: string; newest: number; window: Window | null }) {
  const { events, more, loading, error, earlier } = useEvents(jobId, newest, window?.since ?? null);
  const [wanted, setWanted] = useState("");
  const [chosen, setChosen] = useState<number | null>(null);
  const list = useRef<ListHandle | null>(null);
  const found = useMemo(() => matching(events, wanted, window), [events, wanted, window]);
  const shown = chosen === null ? null : events.find((one) => one.seq === chosen);
  return (
    <div className="events">
      <div className="tools">
        <input
          className="input grep"
          type="search"
          value={wanted}
          placeholder="Filter: incident, checkpoint, rank 7 …"
          aria-label="Filter the events"
          onChange={(event) => setWanted(event.target.value)}
        />
        <span className="small dim">
          {whole(found.length)} of {whole(Math.max(newest, events[events.length - 1]?.seq ?? 0))}
          {loading ? ", reading …" : ""}
        </span>
        {wanted && more && (
          <button type="button" className="button tiny quiet" onClick={earlier}>
            Look further back
          </button>
        )}
      </div>
      {error && (
        <p className="notice bad" role="alert">
          {error}
        </p>
      )}
      <VirtualList
        ref={list}
        count={found.length}
        rowHeight={ROW}
        height={Math.min(336, Math.max(1, found.length) * ROW)}
        label="Events, the newest first"
        onNearEnd={earlier}
        row={(index) => {
          const event = found[found.length - 1 - index]!;
          return (
            <button
              key={event.seq}
              type="button"
              className="event-line"
              style={{ height: ROW }}
              aria-expanded={chosen === event.seq}
              onClick={() => setChosen(chosen === event.seq ? null : event.seq)}
            >
              <time title={moment(event.at)}>{clock(event.at)}</time>
              <span className="dim event-seq">{event.seq}</span>
              <span className={`event-kind ${eventTone(event.kind)}`}>{event.kind}</span>
              <span className="cut">{eventWords(event)}</span>
            </button>
          );
        }}
      />
      {shown && (
        <pre className="event-data" tabIndex={0} aria-label={`Event ${shown.seq}`}>
          {JSON.stringify(shown.data, null, 2)}
        </pre>
      )}
    </div>
  );
}

function matching(events: readonly JobEvent[], wanted: string, window: Window | null): readonly JobEvent[] {
  const text = wanted.trim().toLowerCase();
  if (!text && !window) return events;
  return events.filter(
    (one) =>
      within(one.at, window) &&
      (!text || one.kind.includes(text) || eventWords(one).toLowerCase().includes(text)),
  );
}
