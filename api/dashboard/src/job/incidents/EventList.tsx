/** The events of a job, the newest first. */

import { useCallback, useMemo, useState } from "react";

import type { EventView } from "../../api/types";
import { VirtualList } from "../../ui/VirtualList";
import { within, type Window } from "../axis";
import { clock, moment, NodeIdShortener, whole } from "../format";
import { ShortIds } from "./IncidentCards";
import { useEvents } from "./useEvents";

const ROW = 28;

export function EventList({ jobId, newest, window }: { jobId: string; newest: number; window: Window | null }) {
  const { events, more, loading, error, earlier } = useEvents(jobId, newest, window?.since ?? null);
  const [filter, setFilter] = useState("");
  const [chosen, setChosen] = useState<number | null>(null);
  const [ids] = useState(() => new NodeIdShortener());
  const found = useMemo(() => matchingEvents(events, filter, window), [events, filter, window]);
  const at = useCallback((index: number) => found[found.length - 1 - index]!, [found]);
  const keyOf = useCallback((index: number) => at(index).seq, [at]);
  const shown = chosen === null ? null : events.find((event) => event.seq === chosen);
  return (
    <div className="events">
      <div className="tools">
        <input
          className="input grep"
          type="search"
          value={filter}
          placeholder="Filter: incident, checkpoint, rank 7 …"
          aria-label="Filter the events"
          onChange={(event) => setFilter(event.target.value)}
        />
        <span className="small dim">
          {whole(found.length)} of {whole(Math.max(newest, events[events.length - 1]?.seq ?? 0))}
          {loading ? ", reading …" : ""}
        </span>
        {filter && more && (
          <button type="button" className="button tiny quiet" onClick={earlier}>
            Search earlier events
          </button>
        )}
      </div>
      {error && (
        <p className="notice bad" role="alert">
          {error.message}
        </p>
      )}
      <VirtualList
        count={found.length}
        keyOf={keyOf}
        rowHeight={ROW}
        height={Math.min(336, Math.max(1, found.length) * ROW)}
        label="Events, the newest first"
        onNearEnd={earlier}
        row={(index) => {
          const event = at(index);
          return (
            <button
              type="button"
              className="event-line"
              style={{ height: ROW }}
              aria-expanded={chosen === event.seq}
              onClick={() => setChosen(chosen === event.seq ? null : event.seq)}
            >
              <time title={moment(event.at)}>{clock(event.at)}</time>
              <span className="dim event-seq">{event.seq}</span>
              <span className={`event-kind ${eventTone(event)}`}>{event.kind}</span>
              <span className="cut">
                <ShortIds ids={ids} text={event.text} />
                {event.until != null && ` (until ${clock(event.until)})`}
              </span>
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

function matchingEvents(events: readonly EventView[], filter: string, window: Window | null): readonly EventView[] {
  const text = filter.trim().toLowerCase();
  if (!text && !window) return events;
  return events.filter(
    (event) =>
      within(event.at, window) &&
      (!text ||
        event.kind.includes(text) ||
        event.text.toLowerCase().includes(text) ||
        JSON.stringify(event.data).toLowerCase().includes(text)), // the text cuts long values
  );
}

/** The tone of an event, for its colour: a fault, a recovery, a success, or neither. */
function eventTone({ kind, data }: EventView): "bad" | "warn" | "good" | "neutral" {
  if (kind.startsWith("incident") && data["cause"] === "resize") return "neutral";
  if (kind === "ended" && data["outcome"] !== "SUCCEEDED") return data["outcome"] === "FAILED" ? "bad" : "neutral";
  if (kind === "incident.opened" || kind === "checkpoint.bad" || kind === "digest.mismatch") return "bad";
  if (/^incident|straggler|guard|draining|stalled|attempt\.ended|fault/.test(kind)) return "warn";
  if (/saved|running|ended/.test(kind)) return "good";
  return "neutral";
}
