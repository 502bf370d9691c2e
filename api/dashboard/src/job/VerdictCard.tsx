/** The verdict on a job: sentences about its state and next step, and its main numbers. */

import type { ReactNode } from "react";

import { resizeRange } from "../actions/resizing";
import { ended, type JobView, type VerdictView, type WorldPeriodView } from "../api/types";
import { useLiveStatus, useNow, useQueuePlaces } from "../data";
import { WaitReason } from "../ui/waiting";
import { StateIcon, tone } from "../ui/state";
import { ago, coarse, compact, deviceTime, fineDuration, finePercent, NONE, whole } from "./format";
import { isProgram } from "./level";

interface VerdictCardProps {
  job: JobView;
  verdict: VerdictView | undefined;
  /** The present world; null while the job has none. */
  world: WorldPeriodView | null;
}

export function VerdictCard({ job, verdict, world }: VerdictCardProps) {
  const { progress } = job;
  const share = progress.steps ? (progress.step ?? 0) / progress.steps : 0;
  const over = ended(job.state);
  const places = useQueuePlaces(job.state === "QUEUED");
  const range = resizeRange(job.spec);
  const used = deviceTime(verdict?.device_hours_used);
  const lost = deviceTime(verdict?.device_hours_lost);
  const Figure = isProgram(job) ? KnownFigure : AnyFigure; // a program may report few of them
  return (
    <section className={`verdict card ${tone(job.state)}`} aria-labelledby="verdict">
      <div className="verdict-text">
        <p className="verdict-head" id="verdict" role="heading" aria-level={2}>
          <StateIcon state={job.state} />
          {verdict?.headline ?? job.state.toLowerCase()}
        </p>
        {verdict && (
          <>
            <p className="verdict-doing">{verdict.doing}</p>
            <dl>
              {verdict.last && <VerdictLine name={over ? "Faults" : "Last event"}>{verdict.last}</VerdictLine>}
              {verdict.next && <VerdictLine name={over ? "Result" : "Next"}>{verdict.next}</VerdictLine>}
            </dl>
          </>
        )}
        {job.waiting && <WaitReason id={job.id} waiting={job.waiting} place={places.get(job.id)} />}
      </div>
      <dl className="verdict-numbers">
        <Figure name={progress.steps === null ? "steps" : `of ${whole(progress.steps)} steps`} value={progress.steps === null && !progress.step ? "–" : whole(progress.step)} wide>
          {progress.steps !== null && (
            <span
              className="bar"
              role="progressbar"
              aria-label="Steps"
              aria-valuemin={0}
              aria-valuemax={progress.steps}
              aria-valuenow={progress.step ?? 0}
            >
              <i style={{ width: `${Math.min(100, share * 100)}%` }} />
            </span>
          )}
        </Figure>
        {over ? (
          <Figure name="from start to end" value={fineDuration(elapsed_s(job))} />
        ) : (
          <Figure name="remaining" value={verdict?.eta_s == null ? "–" : fineDuration(verdict.eta_s)} />
        )}
        <Figure name="goodput" means="device-hours in steps that are part of history, over all on the cluster" value={finePercent(verdict?.goodput)} />
        <Figure name={`${used.unit} used`} value={used.value} />
        <Figure name={`${lost.unit} lost`} value={lost.value} />
        <Figure name="loss" value={compact(progress.loss, 4)} />
        <Figure name="tokens/s" value={compact(progress.tokens_per_second)} />
        {range && !over && (
          <Figure
            name={`nodes, ${job.wanted_nodes == null ? `up to ${range.max}` : `${job.wanted_nodes} ordered`}`}
            value={whole(world?.nodes ?? 0)}
          />
        )}
      </dl>
      {job.state === "FAILED" && job.outcome?.traceback && (
        <details className="verdict-traceback" open>
          <summary>Traceback</summary>
          <pre className="traceback" tabIndex={0} aria-label="Traceback">{job.outcome.traceback}</pre>
        </details>
      )}
      <Freshness at={verdict?.fresh_at} over={over} />
    </section>
  );
}

function elapsed_s(job: JobView): number | null {
  return job.ended_at === null || job.started_at === null ? null : job.ended_at - job.started_at;
}

function VerdictLine({ name, children }: { name: string; children: ReactNode }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

type FigureProps = Parameters<typeof AnyFigure>[0];

const KnownFigure = (figure: FigureProps) => figure.value === NONE ? null : <AnyFigure {...figure} />;

function AnyFigure({
  name,
  means,
  value,
  wide = false,
  children,
}: {
  name: string;
  means?: string;
  value: string;
  wide?: boolean;
  children?: ReactNode;
}) {
  return (
    <div className={wide ? "wide" : ""} title={means}>
      <dd>{value}</dd>
      <dt>
        {name}
        {children}
      </dt>
    </div>
  );
}

/** The age of the data: stale data must be labelled as such. */
function Freshness({ at, over }: { at: number | undefined; over: boolean }) {
  const now = useNow();
  const { state, ahead_s } = useLiveStatus();
  if (at === undefined) return null;
  const age = now + ahead_s - at;
  if (over) return <p className="verdict-fresh">ended {ago(at, now + ahead_s)}</p>;
  const stale = age > 15;
  return (
    <p className={stale ? "verdict-fresh stale" : "verdict-fresh"}>
      {stale ? `no update for ${coarse(age)}` : `updated ${ago(at, now + ahead_s)}`}
      {state === "live" ? "" : ", not live"}
    </p>
  );
}
