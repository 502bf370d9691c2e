/** A job as a line of the list: its state, progress, loss, goodput, incidents and age. */

import { memo } from "react";
import { Link, useLocation } from "wouter";
import { type JobRow, type WaitingView } from "../api/types";
import { useNow } from "../data";
import { count, duration, figure, moment, percent, roughly, short, shortId } from "../format";
import { Icon } from "../ui/icons";
import { StateLabel, tone } from "../ui/state";
import { endingOf, isLow, type Ending } from "./ending";
import { placeText, ReservedTag, START_WAIT } from "../ui/waiting";

export const COLUMNS = ["State", "Job", "Progress", "Loss", "Tokens/s", "Goodput", "Incidents", "Age", "Owner"] as const;
const NUMBERS: ReadonlySet<string> = new Set(["Loss", "Tokens/s", "Goodput", "Incidents", "Age"]);

export function JobLineHead() {
  return (
    <div role="row" className="job-line head" aria-rowindex={1}>
      {COLUMNS.map((name) => (
        <span key={name} role="columnheader" className={NUMBERS.has(name) ? "right" : undefined}>
          {name}
        </span>
      ))}
    </div>
  );
}

interface JobLineProps {
  index: number;
  row: JobRow | undefined;
  /** Its place in the queue, if known. */
  place: number | undefined;
  chosen: boolean;
  onChoose: (index: number) => void;
}

export const JobLine = memo(function JobLine({ index, row, place, chosen, onChoose }: JobLineProps) {
  const [, go] = useLocation();
  if (!row) return <PlaceholderLine index={index} />;
  const to = `/jobs/${row.id}`;
  return (
    <div
      role="row" aria-rowindex={index + 2} className={`job-line${chosen ? " chosen" : ""}`} data-job={row.id}
      onClick={(event) => {
        if (!(event.target as Element).closest("a, button") && !getSelection()?.toString()) go(to);
      }}
    >
      <span role="cell" className="cell-state">
        <StateLabel state={row.state} chip />
      </span>
      <span role="cell" className="cell-name">
        <Link to={to} data-row-link={index} onFocus={() => onChoose(index)} className="cut">
          {row.name}
        </Link>
        <span className="mono dim small id" title={row.id}>{shortId(row.id)}</span>
      </span>
      <span role="cell" className="cell-progress">
        <Progress row={row} place={place} />
      </span>
      <span role="cell" className="cell-loss right">{figure(row.loss)}</span>
      <span role="cell" className="cell-speed right">{short(row.tokens_per_second)}</span>
      <span role="cell" className="cell-goodput right">
        <Goodput row={row} />
      </span>
      <span role="cell" className="cell-faults right">
        {row.incidents > 0 ? <span className="faults"><Icon name="bolt" size={12} />{row.incidents}</span> : <span className="dim">0</span>}
      </span>
      <Age at={row.created_at} />
      <span role="cell" className="cell-owner cut second">
        {row.owner === null ? <span className="dim">–</span> : <Link to={`/jobs?owner=${encodeURIComponent(row.owner)}`} className="owner">{row.owner}</Link>}
      </span>
    </div>
  );
});

function Age({ at }: { at: number }) {
  const now = useNow();
  return (
    <span role="cell" className="cell-age right second" title={moment(at)}>
      {roughly(now - at)}
    </span>
  );
}

function Progress({ row, place }: { row: JobRow; place: number | undefined }) {
  const ending = endingOf(row, useNow());
  if (ending) return <EndNote row={row} ending={ending} />;
  return row.state === "QUEUED" && row.waiting ? <QueueNote row={row} waiting={row.waiting} place={place} /> : <Steps row={row} />;
}

/** Instead of the progress of a job that has ended. */
function EndNote({ row, ending }: { row: JobRow; ending: Ending }) {
  return (
    <span className={`progress ${tone(row.state)}`}>
      <span className="outcome cut small" title={ending.outcome}>{ending.outcome}</span>
      <span className="dim cut small" title={`${moment(row.ended_at)}: ${ending.incidents}`}>
        {ending.times}
        <span className="end-faults"> · {ending.incidents}</span>
      </span>
    </span>
  );
}

/** The progress with a note: the remaining time, or the awaited resource. */
function Steps({ row }: { row: JobRow }) {
  const share = row.steps ? (row.step ?? 0) / row.steps : 0;
  return (
    <span className={`progress ${tone(row.state)}`}>
      <span className="progress-text small">
        <span>
          {row.step === null ? "no step reported" : row.steps === null ? `step ${count(row.step)}` : count(row.step)}
          {row.step !== null && row.steps !== null && <span className="dim"> / {count(row.steps)}</span>}
        </span>
        <span className="dim cut" title={row.waiting?.reason}>{progressNote(row)}</span>
      </span>
      {row.steps !== null && (
        <span className="bar" role="progressbar" aria-label={`Progress of ${row.name}`} aria-valuemin={0} aria-valuemax={row.steps} aria-valuenow={row.step ?? 0}>
          <i style={{ width: `${Math.min(100, share * 100)}%` }} />
        </span>
      )}
    </span>
  );
}

/** Instead of the progress of a job in the queue: its place, a reservation, and why it waits. */
function QueueNote({ row, waiting, place }: { row: JobRow; waiting: WaitingView; place: number | undefined }) {
  return (
    <span className="progress">
      <span className="progress-text small">
        <span>{place === undefined ? `waiting for ${waiting.resource}` : placeText(place)}</span>
        <ReservedTag id={row.id} waiting={waiting} />
      </span>
      <span className="dim cut small" title={waiting.reason}>{waiting.reason}</span>
    </span>
  );
}

function progressNote(row: JobRow): string {
  if (row.waiting?.resource === START_WAIT) return row.attempt ? `attempt ${row.attempt} starts` : "starts";
  if (row.waiting) return `waiting for ${row.waiting.resource}`;
  return row.eta_s === null ? "" : `${duration(row.eta_s)} left`;
}

function Goodput({ row }: { row: JobRow }) {
  const note = row.goodput !== null && !row.goodput_settled ? "Its start is still a large part of its time" : undefined;
  return (
    <span className={isLow(row) ? "low" : row.goodput === null || note ? "dim" : undefined} title={note}>
      {percent(row.goodput)}
    </span>
  );
}

function PlaceholderLine({ index }: { index: number }) {
  return (
    <div role="row" aria-rowindex={index + 2} className="job-line">
      {COLUMNS.map((name) => (
        <span key={name} role="cell">
          <span className="ghost" aria-hidden="true">· · ·</span>
        </span>
      ))}
    </div>
  );
}
