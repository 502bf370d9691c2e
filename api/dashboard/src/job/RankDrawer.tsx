/** The drawer of a rank: its place, a comparison with its peers, its workers, stacks and log. */

import { useEffect, useMemo, useRef, useState, type ReactNode } from "react";

import type { RankDetailView, RankView } from "../api/types";
import type { Window } from "./axis";
import { bytes, clock, compact, fineDuration, moment, whole } from "./format";
import { medians, rowOf, SLOW, slowness } from "./heatmap/heat";
import { useWidth } from "./hooks";
import { Frames } from "./incidents/IncidentCards";
import { Logs, type LogChoice } from "./logs/Logs";
import { useRankOf } from "./useJobPage";
import type { RankHistory } from "./views";

interface RankDrawerProps {
  jobId: string;
  rank: number;
  now: RankView | undefined;
  history: RankHistory | undefined;
  window: Window | null;
  live: boolean;
  onClose: () => void;
  onRank: (rank: number) => void;
  onIncident: (number: number) => void;
}

export function RankDrawer({ jobId, rank, now, history, window, live, onClose, onRank, onIncident }: RankDrawerProps) {
  const dialog = useRef<HTMLDialogElement | null>(null);
  useEffect(() => {
    if (dialog.current && !dialog.current.open) dialog.current.showModal();
  }, []);
  const { value: detail, error } = useRankOf(jobId, rank);
  const here = detail?.now ?? now;
  const outlier = useMemo(() => history !== undefined && isMarked(history, rank), [history, rank]);
  const [choice, setChoice] = useState<LogChoice>({ rank, attempt: null, level: null, grep: "" });
  useEffect(() => setChoice({ rank, attempt: null, level: null, grep: "" }), [rank]);
  return (
    <dialog
      className="drawer"
      ref={dialog}
      aria-labelledby="drawer-title"
      onClose={onClose}
      onClick={(event) => event.target === dialog.current && dialog.current?.close()}
    >
      <div className="drawer-inside">
        <header>
          <h2 id="drawer-title">Rank {rank}</h2>
          {here && <span className="second">{here.node || here.host}</span>}
          {outlier && here?.slow_factor != null && here.slow_factor >= SLOW && (
            <span className="tag warn">▲ {compact(here.slow_factor)}× its peers</span>
          )}
          <span className="grow" />
          <button type="button" className="button tiny" disabled={rank === 0} onClick={() => onRank(rank - 1)}>
            <span aria-hidden="true">‹</span>
            <span className="unseen">Rank {rank - 1}</span>
          </button>
          <button type="button" className="button tiny" disabled={history !== undefined && rank >= history.ranks.length - 1} onClick={() => onRank(rank + 1)}>
            <span aria-hidden="true">›</span>
            <span className="unseen">Rank {rank + 1}</span>
          </button>
          <button type="button" className="button tiny" onClick={() => dialog.current?.close()}>
            Close
          </button>
        </header>
        {error && !detail && (
          <p className="notice bad" role="alert">
            {error.message}
          </p>
        )}
        {here && <Facts here={here} memory={detail?.memory_bytes ?? null} />}
        {history && <PeerComparison history={history} rank={rank} />}
        {detail && <Workers detail={detail} />}
        {detail && <LastStacks detail={detail} onIncident={onIncident} />}
        <DrawerPart name="Log">
          <Logs
            jobId={jobId}
            window={window}
            choice={{ ...choice, rank }}
            onChoice={setChoice}
            attempts={[]}
            ofRank
            height={260}
            live={live}
          />
        </DrawerPart>
      </div>
    </dialog>
  );
}

function DrawerPart({ name, children }: { name: string; children: ReactNode }) {
  return (
    <section className="part">
      <h3>{name}</h3>
      {children}
    </section>
  );
}

function Facts({ here, memory }: { here: RankView; memory: number | null }) {
  const place = Object.entries(here.coordinates)
    .map(([axis, at]) => `${axis} ${at}`)
    .join(", ");
  const facts: [string, string][] = [
    ["phase", here.phase ?? "unknown"],
    ["step", whole(here.step)],
    ["lag", here.lag_steps == null ? "–" : here.lag_steps === 1 ? "1 step" : `${here.lag_steps} steps`],
    ["compute time", fineDuration(here.step_time_s)],
    ["last heartbeat", here.silent_s == null ? "–" : `${fineDuration(here.silent_s)} ago`],
    ["memory", bytes(memory)],
    ["role", here.role],
    ["mesh coordinates", place || "–"],
    ["worker", here.worker],
    ["host", here.host],
    ["process id", here.pid == null ? "–" : String(here.pid)],
  ];
  return (
    <dl className="facts">
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd className="cut" title={value}>
            {value}
          </dd>
        </div>
      ))}
    </dl>
  );
}

/** Whether the rank is slow among its peers; its newest step alone may be noise. */
const isMarked = (history: RankHistory, rank: number): boolean =>
  slowness(history, "compute_s").marked[history.ranks.findIndex((member) => member.rank === rank)] ?? false;

/** The values of the rank and the median of all ranks over time. */
function PeerComparison({ history, rank }: { history: RankHistory; rank: number }) {
  const [box, width] = useWidth<HTMLDivElement>();
  const index = history.ranks.findIndex((member) => member.rank === rank);
  const middle = useMemo(() => medians(history), [history]);
  const own = index < 0 ? undefined : rowOf(history, index);
  const height = 64;
  const known = [...(own ?? []), ...middle].filter((value) => !Number.isNaN(value));
  if (!own || !known.length) return null;
  const most = Math.max(...known) * 1.05 || 1;
  const line = (values: Float32Array | Float64Array) => {
    let text = "";
    values.forEach((value, bucket) => {
      if (Number.isNaN(value)) return;
      const x = ((bucket + 0.5) / values.length) * width;
      const joined = text !== "" && bucket > 0 && !Number.isNaN(values[bucket - 1]);
      text += `${joined ? "L" : "M"}${x.toFixed(1)},${(height - (value / most) * height).toFixed(1)}`;
    });
    return text;
  };
  return (
    <DrawerPart name="Compared with its peers">
      <div className="beside" ref={box}>
        <svg width={width} height={height + 16} role="img" aria-label={`Rank ${rank} and the median of all ranks over time`}>
          <line className="axis-line" x1="0" x2={width} y1={height + 0.5} y2={height + 0.5} />
          <path className="median" d={line(middle)} />
          <path className="own" d={line(own)} />
          <text className="axis-label" x="0" y={height + 13}>
            {clock(history.since)}
          </text>
          <text className="axis-label" x={width} y={height + 13} textAnchor="end">
            {clock(history.until)}
          </text>
        </svg>
        <p className="small dim">
          <span className="key-line own" aria-hidden="true" /> rank {rank}{" "}
          <span className="key-line median" aria-hidden="true" /> median of all ranks, up to {fineDuration(most)}
        </p>
      </div>
    </DrawerPart>
  );
}

function Workers({ detail }: { detail: RankDetailView }) {
  if (!detail.workers.length) return null;
  return (
    <DrawerPart name="Workers">
      <div className="scroll-x drawer-table" tabIndex={0} role="region" aria-label="Workers of this rank">
        <table className="table">
          <thead>
            <tr>
              <th scope="col">Attempt</th>
              <th scope="col">Worker</th>
              <th scope="col">Node</th>
              <th scope="col">Process</th>
              <th scope="col">From</th>
              <th scope="col" className="right">
                For
              </th>
            </tr>
          </thead>
          <tbody>
            {detail.workers.map((worker, index) => {
              const before = detail.workers[index + 1];
              const fresh = before !== undefined && before.worker !== worker.worker;
              return (
                <tr key={`${worker.attempt} ${worker.worker}`}>
                  <td>{worker.attempt}</td>
                  <td>
                    <code>{worker.worker}</code> {fresh && <span className="tag">new</span>}
                  </td>
                  <td>{worker.node || worker.host}</td>
                  <td>{worker.pid ?? "–"}</td>
                  <td className="nowrap">
                    <time title={moment(worker.since)}>{clock(worker.since)}</time>
                  </td>
                  <td className="right nowrap">
                    {worker.until === null ? <span className="tag good">now</span> : fineDuration(worker.until - worker.since)}
                  </td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
    </DrawerPart>
  );
}

function LastStacks({ detail, onIncident }: { detail: RankDetailView; onIncident: (number: number) => void }) {
  const last = detail.stacks[0];
  return (
    <DrawerPart name="Last stacks">
      {last ? (
        detail.stacks.slice(0, 5).map((stack, index) => (
          <details key={`${stack.incident} ${index}`} open={index === 0}>
            <summary>
              <time title={moment(stack.at)}>{clock(stack.at)}</time>, <code>{stack.frames[0]}</code>
            </summary>
            <Frames frames={stack.frames} />
            <button type="button" className="link" onClick={() => onIncident(stack.incident)}>
              incident {stack.incident}
            </button>
          </details>
        ))
      ) : (
        <p className="small dim">No incident has captured the stack of this rank.</p>
      )}
      {detail.incidents.length > 0 && (
        <p className="small">
          The rank was part of{" "}
          {detail.incidents.slice(0, 12).map((number) => (
            <button key={number} type="button" className="link" onClick={() => onIncident(number)}>
              incident {number}
            </button>
          ))}
        </p>
      )}
    </DrawerPart>
  );
}
