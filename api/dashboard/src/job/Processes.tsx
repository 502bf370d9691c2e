/** The processes of a job's ranks: where each runs, and what is known of its progress. A column that
 * is known of no rank is left out: a program that reports nothing has neither phases nor steps. */

import { useState, type ReactNode } from "react";

import type { RanksView, RankView } from "../api/types";
import { plural } from "../format";
import { compact, fineDuration, NodeIdShortener, whole } from "./format";

interface ProcessesProps {
  ranks: RanksView;
  live: boolean;
  onOpen: (rank: number) => void;
}

const INITIAL_ROWS = 100;

interface Column {
  name: string;
  known: (rank: RankView) => boolean;
  cell: (rank: RankView) => ReactNode;
  right?: boolean;
}

const COLUMNS: readonly Column[] = [
  { name: "Phase", known: ({ phase }) => phase !== null, cell: ({ phase }) => phase ?? "–" },
  { name: "Step", known: ({ step }) => step !== null, cell: ({ step }) => whole(step), right: true },
  { name: "Behind", known: ({ lag_steps }) => !!lag_steps, cell: ({ lag_steps }) => (lag_steps ? plural(lag_steps, "step") : "–"), right: true },
  { name: "Compute time", known: ({ step_time_s }) => !!step_time_s, cell: ({ step_time_s }) => fineDuration(step_time_s), right: true },
  { name: "Against its peers", known: ({ slow_factor }) => slow_factor !== null, cell: ({ slow_factor }) => (slow_factor === null ? "–" : `${compact(slow_factor)}×`), right: true },
  { name: "Last heartbeat", known: ({ silent_s }) => silent_s !== null, cell: ({ silent_s }) => (silent_s === null ? "–" : `${fineDuration(silent_s)} ago`), right: true },
];

export function Processes({ ranks: { ranks }, live, onOpen }: ProcessesProps) {
  const [all, setAll] = useState(false);
  const [ids] = useState(() => new NodeIdShortener());
  if (ranks.length === 0) return <p className="nothing">{live ? "No process has started yet." : "No process was started."}</p>;
  ranks.forEach(({ node }) => ids.learn(node));
  const columns = COLUMNS.filter(({ known }) => ranks.some(known));
  const shown = all ? ranks : ranks.slice(0, INITIAL_ROWS);
  return (
    <>
      <div className="scroll-x" tabIndex={0} role="region" aria-label="Processes of this job">
        <table className="table">
          <thead>
            <tr>
              <th scope="col">Rank</th>
              <th scope="col">Node</th>
              <th scope="col">Process</th>
              {columns.map(({ name, right }) => (
                <th key={name} scope="col" className={right ? "right" : undefined}>{name}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {shown.map((rank) => (
              <tr key={rank.rank}>
                <td>
                  <button type="button" className="link" onClick={() => onOpen(rank.rank)}>rank {rank.rank}</button>
                </td>
                <td title={rank.node || rank.host}>{ids.shorten(rank.node || rank.host) || "–"}</td>
                <td>{rank.pid === null ? "–" : <>pid {rank.pid}</>}</td>
                {columns.map(({ name, cell, right }) => (
                  <td key={name} className={right ? "right" : undefined}>{cell(rank)}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {shown.length < ranks.length && (
        <button type="button" className="button quiet tiny" onClick={() => setAll(true)}>
          All {whole(ranks.length)} processes
        </button>
      )}
    </>
  );
}
