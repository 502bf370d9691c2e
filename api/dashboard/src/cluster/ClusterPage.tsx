/** The cluster page: capacity, the nodes with their jobs and health, and the queue. */

import { useEffect, useMemo, useRef, type ReactNode } from "react";
import { Link } from "wouter";
import { get } from "../api/client";
import type { ClusterView, JobPage, NodeView } from "../api/types";
import { useNow, useResource } from "../data";
import { ReservedTag } from "../ui/waiting";
import { count, lasting, number, plural } from "../format";
import { useShortcuts } from "../keyboard/keys";
import { useFilters } from "../routing/router";
import { Icon } from "../ui/icons";
import { Failure } from "../ui/notice";
import { Nodes } from "./Nodes";
import { NodeMap } from "./NodeMap";
import { countNodes, isStandby, nodeNames, standingOf, STANDINGS, type NodeCounts, type NodeStanding } from "./standing";
import "./cluster.css";

export default function ClusterPage() {
  const { value: cluster, error, reload } = useResource("cluster", (signal) => get<ClusterView>("/cluster", {}, signal), { every_ms: 3000 });
  const names = useNames();
  const [params, change] = useFilters();
  const search = useRef<HTMLInputElement>(null);
  const q = params.get("q") ?? "";
  const wanted = params.getAll("standing").filter((standing): standing is NodeStanding => standing in STANDINGS);
  useEffect(() => {
    document.title = "Cluster · Holdfast";
  }, []);
  useShortcuts("Cluster", [{ keys: "/", label: "Search nodes", run: () => search.current?.focus() }]);
  const all = cluster?.nodes;
  const called = useMemo(() => nodeNames(all ?? []), [all]);
  const counts = useMemo(() => countNodes(all ?? []), [all]);
  const nodes = (all ?? []).filter((node) => nodeMatches(node, q, wanted, names, called));
  return (
    <div className="page">
      <header>
        <h1>Cluster</h1>
        {cluster && (
          <span className="dim">
            {plural(counts.there, "node")}
            {counts.gone > 0 && `, and ${count(counts.gone)} gone`}
          </span>
        )}
      </header>
      {error && <Failure error={error} retry={() => void reload()} />}
      {cluster && (
        <>
          <Capacity cluster={cluster} counts={counts} />
          {cluster.nodes.length > 0 && <NodeMap nodes={cluster.nodes} names={names} called={called} onPick={(name) => change({ q: name, standing: null })} />}
          <div className="filters">
            <div className="search">
              <Icon name="search" />
              <input ref={search} className="input" type="search" placeholder="Node, host or job" aria-label="Search nodes" value={q} onChange={(event) => change({ q: event.target.value })}
                onKeyDown={(event) => event.key === "Escape" && event.currentTarget.blur()} />
              <kbd className="only-wide" aria-hidden="true">/</kbd>
            </div>
            <Standings counts={counts} wanted={wanted} change={(standing) => change({ standing })} />
          </div>
          <div className="cluster-parts">
            <Nodes nodes={nodes} names={names} called={called} onChanged={() => void reload()} />
            <Queue cluster={cluster} />
          </div>
        </>
      )}
      {!cluster && !error && <div className="card ghost" style={{ height: 320 }} aria-busy="true" />}
    </div>
  );
}

/** The names of the jobs that may have ranks on nodes; a node lists only the ids. */
function useNames(): ReadonlyMap<string, string> {
  const state = ["STARTING", "RUNNING", "RECOVERING", "RESIZING", "PAUSING", "CANCELLING"];
  const { value } = useResource("names of jobs", (signal) => get<JobPage>("/jobs", { state, limit: 500 }, signal), { every_ms: 5000 });
  return new Map(value?.items.map((row) => [row.id, row.name]));
}

type Names = ReadonlyMap<string, string>;

function nodeMatches(node: NodeView, q: string, wanted: readonly NodeStanding[], names: Names, called: Names): boolean {
  if (wanted.length > 0 && !wanted.includes(standingOf(node))) return false;
  const text = q.toLowerCase();
  const jobs = [...node.jobs, ...node.standby_of];
  const roles = [node.head ? "head" : "", isStandby(node) ? "standby" : ""];
  return [node.id, node.host, called.get(node.id) ?? "", ...roles, ...jobs, ...jobs.map((id) => names.get(id) ?? "")].some((field) => field.toLowerCase().includes(text));
}

function Standings({ counts, wanted, change }: { counts: NodeCounts; wanted: readonly NodeStanding[]; change: (to: readonly NodeStanding[]) => void }) {
  const shown = (Object.keys(STANDINGS) as NodeStanding[])
    .map((standing) => ({ standing, n: counts.by[standing] }))
    .filter(({ standing, n }) => n > 0 || wanted.includes(standing));
  return (
    <div className="chips" role="group" aria-label="Standing">
      {shown.map(({ standing, n }) => (
        <button key={standing} type="button" className={`filter-chip ${STANDINGS[standing].tone}`} aria-pressed={wanted.includes(standing)} title={STANDINGS[standing].means}
          onClick={() => change(wanted.includes(standing) ? wanted.filter((other) => other !== standing) : [...wanted, standing])}>
          <i className="dot" />
          {STANDINGS[standing].label}
          <b>{count(n)}</b>
        </button>
      ))}
    </div>
  );
}

function Capacity({ cluster, counts }: { cluster: ClusterView; counts: NodeCounts }) {
  const { capacity } = cluster;
  const now = useNow();
  const oldest = cluster.queue[0];
  return (
    <div className="tiles">
      <Tile title="Nodes in use" used={counts.used} of={counts.usable} note={<OtherNodes counts={counts} heads={cluster.nodes.filter((node) => node.there && node.head && standingOf(node) === "bare").length} />} />
      <Tile title="CPUs in use" used={capacity.cpus - capacity.free_cpus} of={capacity.cpus} note={`${number(capacity.free_cpus)} free`} />
      {capacity.gpus > 0 && <Tile title="GPUs in use" used={capacity.gpus - capacity.free_gpus} of={capacity.gpus} note={`${number(capacity.free_gpus)} free`} />}
      <div className="card tile">
        <span className="dim small">Waiting in the queue</span>
        <strong>{count(cluster.queued)}</strong>
        <span className="small second">{oldest ? `the oldest for ${lasting(now - oldest.since)}` : "no job waits"}</span>
      </div>
    </div>
  );
}

/** The standbys among the nodes in use, and the nodes that are not among those that may be used. */
function OtherNodes({ counts, heads }: { counts: NodeCounts; heads: number }) {
  const { standby, excluded, leaving, bare } = counts;
  const others = [
    standby > 0 && <span key="standby">{count(standby)} as standby</span>,
    excluded > 0 && (
      <span key="excluded" className="is-recovering">
        {count(excluded)} excluded{leaving > 0 && `, ${count(leaving)} with ranks`}
      </span>
    ),
    bare > 0 && <span key="bare">{bare === 1 && heads === 1 ? "the head runs no ranks" : `${count(bare)} without CPUs`}</span>,
  ].filter(Boolean);
  return others.length > 0 ? <span className="tile-notes">{others}</span> : "none excluded";
}

function Tile({ title, used, of, note }: { title: string; used: number; of: number; note: ReactNode }) {
  return (
    <div className="card tile">
      <span className="dim small">{title}</span>
      <strong>
        {number(used)} <span className="dim">/ {number(of)}</span>
      </strong>
      <span className="bar" aria-hidden="true">
        <i style={{ width: `${of > 0 ? (100 * used) / of : 0}%` }} />
      </span>
      <span className="small second">{note}</span>
    </div>
  );
}

function Queue({ cluster }: { cluster: ClusterView }) {
  const now = useNow();
  return (
    <section className="card queue" aria-label="Queue">
      <header>
        <h2 className="grow">Queue</h2>
        <span className="dim small">oldest first</span>
      </header>
      {cluster.queue.length === 0 ? (
        <p className="second queue-empty">No job waits.</p>
      ) : (
        <ol>
          {cluster.queue.map((queued) => (
            <li key={queued.job}>
              <span className="dim small place">{queued.place}</span>
              <div className="grow">
                <div className="line">
                  <Link to={`/jobs/${queued.job}`} className="cut grow strong">
                    {queued.name}
                  </Link>
                  <ReservedTag id={queued.job} waiting={queued.waiting} />
                  <span className="dim small">{lasting(now - queued.since)}</span>
                </div>
                <p className="small second">{queued.waiting ? queued.waiting.reason : "not examined yet"}</p>
              </div>
            </li>
          ))}
        </ol>
      )}
      {cluster.queued > cluster.queue.length && <p className="dim small queue-empty">and {count(cluster.queued - cluster.queue.length)} more</p>}
    </section>
  );
}
