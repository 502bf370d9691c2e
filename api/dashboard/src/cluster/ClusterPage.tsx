/** The cluster page: capacity, the nodes with their jobs and health, and the queue. */

import { useEffect, useRef } from "react";
import { Link } from "wouter";
import { get } from "../api/client";
import type { ClusterView, JobPage, NodeView } from "../api/types";
import { useNow, useResource } from "../data";
import { ReservedTag } from "../ui/waiting";
import { count, number, plural, roughly } from "../format";
import { useShortcuts } from "../keyboard/keys";
import { useFilters } from "../routing/router";
import { Icon } from "../ui/icons";
import { Failure } from "../ui/notice";
import { Nodes } from "./Nodes";
import { NodeMap } from "./NodeMap";
import { standingOf, STANDINGS, type NodeStanding } from "./standing";
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
  const nodes = (cluster?.nodes ?? []).filter((node) => nodeMatches(node, q, wanted, names));
  return (
    <div className="page">
      <header>
        <h1>Cluster</h1>
        {cluster && <span className="dim">{plural(cluster.nodes.filter((node) => node.there).length, "node")}</span>}
      </header>
      {error && <Failure error={error} retry={() => void reload()} />}
      {cluster && (
        <>
          <Capacity cluster={cluster} />
          {cluster.nodes.length > 0 && <NodeMap nodes={cluster.nodes} names={names} onPick={(id) => change({ q: id, standing: null })} />}
          <div className="filters">
            <div className="search">
              <Icon name="search" />
              <input ref={search} className="input" type="search" placeholder="Node, host or job" aria-label="Search nodes" value={q} onChange={(event) => change({ q: event.target.value })}
                onKeyDown={(event) => event.key === "Escape" && event.currentTarget.blur()} />
              <kbd className="only-wide" aria-hidden="true">/</kbd>
            </div>
            <Standings nodes={cluster.nodes} wanted={wanted} change={(standing) => change({ standing })} />
          </div>
          <div className="cluster-parts">
            <Nodes nodes={nodes} names={names} onChanged={() => void reload()} />
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

function nodeMatches(node: NodeView, q: string, wanted: readonly NodeStanding[], names: ReadonlyMap<string, string>): boolean {
  if (wanted.length > 0 && !wanted.includes(standingOf(node))) return false;
  const text = q.toLowerCase();
  return [node.id, node.host, ...node.jobs, ...node.jobs.map((id) => names.get(id) ?? "")].some((field) => field.toLowerCase().includes(text));
}

function Standings({ nodes, wanted, change }: { nodes: readonly NodeView[]; wanted: readonly NodeStanding[]; change: (to: readonly NodeStanding[]) => void }) {
  const shown = (Object.keys(STANDINGS) as NodeStanding[])
    .map((standing) => ({ standing, n: nodes.filter((node) => standingOf(node) === standing).length }))
    .filter(({ standing, n }) => n > 0 || wanted.includes(standing));
  return (
    <div className="chips" role="group" aria-label="Standing">
      {shown.map(({ standing, n }) => (
        <button key={standing} type="button" className={`filter-chip ${STANDINGS[standing].tone}`} aria-pressed={wanted.includes(standing)}
          onClick={() => change(wanted.includes(standing) ? wanted.filter((other) => other !== standing) : [...wanted, standing])}>
          <i className="dot" />
          {STANDINGS[standing].label}
          <b>{count(n)}</b>
        </button>
      ))}
    </div>
  );
}

function Capacity({ cluster }: { cluster: ClusterView }) {
  const { capacity, nodes } = cluster;
  const there = nodes.filter((node) => node.there);
  const excluded = there.filter((node) => node.state !== "ready").length;
  const now = useNow();
  const oldest = cluster.queue[0];
  return (
    <div className="tiles">
      <Tile title="Nodes in use" used={capacity.nodes - capacity.free_nodes} of={capacity.nodes} note={excluded > 0 ? `${excluded} excluded` : "none excluded"} warn={excluded > 0} />
      <Tile title="CPUs in use" used={capacity.cpus - capacity.free_cpus} of={capacity.cpus} note={`${number(capacity.free_cpus)} free`} />
      {capacity.gpus > 0 && <Tile title="GPUs in use" used={capacity.gpus - capacity.free_gpus} of={capacity.gpus} note={`${number(capacity.free_gpus)} free`} />}
      <div className="card tile">
        <span className="dim small">Waiting in the queue</span>
        <strong>{count(cluster.queued)}</strong>
        <span className="small second">{oldest ? `the oldest for ${roughly(now - oldest.since)}` : "no job waits"}</span>
      </div>
    </div>
  );
}

function Tile({ title, used, of, note, warn = false }: { title: string; used: number; of: number; note: string; warn?: boolean }) {
  return (
    <div className="card tile">
      <span className="dim small">{title}</span>
      <strong>
        {number(used)} <span className="dim">/ {number(of)}</span>
      </strong>
      <span className="bar" aria-hidden="true">
        <i style={{ width: `${of > 0 ? (100 * used) / of : 0}%` }} />
      </span>
      <span className={`small ${warn ? "is-recovering" : "second"}`}>{note}</span>
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
                  <span className="dim small">{roughly(now - queued.since)}</span>
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
