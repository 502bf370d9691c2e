/** The series of a job as small charts with a shared cursor. */

import { useEffect, useMemo, useState, type ReactNode } from "react";

import type { IncidentView, MetricPage } from "../api/types";
import type { Window } from "./axis";
import { Chart, type Moment } from "./Chart";
import { columns, shown, type XAxis } from "./series";

interface ChartGridProps {
  metrics: MetricPage;
  incidents: readonly IncidentView[];
  axis: XAxis;
  window: Window | null;
  onBrush: (brush: Window | null) => void;
  /** Only the first charts, in a row. */
  brief: boolean;
}

const COLOURS = ["--series-1", "--series-4", "--series-2", "--series-5", "--series-3", "--series-6"];
const INITIAL_CHARTS = 6;
const BRIEF_CHARTS = 3;

export function Charts({ metrics, incidents, axis, window, onBrush, brief }: ChartGridProps) {
  const [all, setAll] = useState(false);
  const names = useMemo(() => shown(metrics), [metrics]);
  const moments = useMemo<Moment[]>(
    () => incidents.map((incident) => ({ at: incident.signalled_at ?? incident.opened_at, step: incident.restored_step ?? -1 })),
    [incidents],
  );
  const hasDiscarded = useMemo(
    () => names.length > 0 && columns(metrics, names[0]!, "time", window).discarded.length > 0,
    [metrics, names, window],
  );
  if (!names.length) return <p className="nothing">No step has reported its metrics yet.</p>;
  const drawn = all ? names : names.slice(0, brief ? BRIEF_CHARTS : INITIAL_CHARTS);
  return (
    <>
      <div className="charts">
        {drawn.map((name, index) => (
          <Staggered key={name} place={index}>
            <Chart
              name={name}
              colour={COLOURS[index % COLOURS.length]!}
              metrics={metrics}
              axis={axis}
              window={window}
              incidents={moments}
              onBrush={onBrush}
            />
          </Staggered>
        ))}
      </div>
      <div className="charts-foot">
        <p className="small dim">
          <span className="key-line" aria-hidden="true" /> history{" "}
          {hasDiscarded && (
            <>
              <span className="key-line faded" aria-hidden="true" /> steps discarded by a rollback{" "}
            </>
          )}
          {moments.length > 0 && (
            <>
              <span className="key-fault" aria-hidden="true" /> incidents
            </>
          )}
        </p>
        {!brief && names.length > INITIAL_CHARTS && (
          <button type="button" className="button quiet tiny" aria-expanded={all} onClick={() => setAll(!all)}>
            {all ? "Fewer charts" : `All ${names.length} charts`}
          </button>
        )}
      </div>
    </>
  );
}

/** Delays each chart by one frame more, so that the page stays responsive meanwhile. */
function Staggered({ place, children }: { place: number; children: ReactNode }) {
  const [due, setDue] = useState(place === 0);
  useEffect(() => {
    if (due) return;
    const timer = setTimeout(() => setDue(true), 16 * place);
    return () => clearTimeout(timer);
  }, [due, place]);
  return due ? children : <div className="chart placeholder" />;
}
