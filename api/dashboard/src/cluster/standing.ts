/** How nodes stand, how many there are of each, and what they are called. Pure. */

import type { NodeView } from "../api/types";
import { NodeIdShortener } from "../job/format";

/** The displayed standing of a node; `bare`: it has no CPUs and GPUs, as the head of many clusters;
 * `gone`: it is not in the cluster at present. */
export type NodeStanding = "ready" | "unwell" | "cordoned" | "quarantined" | "bare" | "gone";

export const STANDINGS: Record<NodeStanding, { label: string; tone: string; means: string }> = {
  ready: { label: "Ready", tone: "is-running", means: "may run ranks" },
  unwell: { label: "Unhealthy", tone: "is-recovering", means: "may run ranks; a probe found something" },
  quarantined: { label: "Quarantined", tone: "is-failed", means: "excluded: gets no new ranks" },
  cordoned: { label: "Cordoned", tone: "is-paused", means: "excluded: gets no new ranks" },
  bare: { label: "Runs no ranks", tone: "is-queued", means: "has no CPUs and no GPUs for ranks" },
  gone: { label: "Gone", tone: "is-cancelled", means: "not in the cluster now" },
};

export function standingOf(node: NodeView): NodeStanding {
  if (!node.there) return "gone";
  if (!node.cpus && !node.gpus) return "bare";
  if (node.state !== "ready") return node.state;
  return node.findings.some((finding) => finding.level !== "note") ? "unwell" : "ready";
}

/** `there` = `usable` + `excluded` + `bare`; with `gone`, they are all nodes. */
export interface NodeCounts {
  by: Record<NodeStanding, number>;
  there: number;
  gone: number;
  /** Nodes that may run ranks, and those of them that have some or are a job's standby. */
  usable: number;
  used: number;
  standby: number;
  excluded: number;
  /** Excluded nodes that still have ranks. */
  leaving: number;
  bare: number;
}

export function countNodes(nodes: readonly NodeView[]): NodeCounts {
  const by: Record<NodeStanding, number> = { ready: 0, unwell: 0, quarantined: 0, cordoned: 0, bare: 0, gone: 0 };
  let used = 0;
  let standby = 0;
  let leaving = 0;
  for (const node of nodes) {
    const standing = standingOf(node);
    by[standing] += 1;
    if (standing === "ready" || standing === "unwell") {
      if (isUsed(node)) used += 1;
      if (isStandby(node)) standby += 1;
    } else if (standing === "cordoned" || standing === "quarantined") {
      if (node.jobs.length > 0) leaving += 1;
    }
  }
  const usable = by.ready + by.unwell;
  const excluded = by.cordoned + by.quarantined;
  return { by, there: usable + excluded + by.bare, gone: by.gone, usable, used, standby, excluded, leaving, bare: by.bare };
}

/** A node without ranks that a job keeps to replace another one. */
export const isStandby = (node: NodeView): boolean => node.jobs.length === 0 && node.standby_of.length > 0;
export const isUsed = (node: NodeView): boolean => node.jobs.length > 0 || node.standby_of.length > 0;

/** Short and distinct names by node id: the host; where several nodes have it, with the start of the
 * id, which commands take for the id. */
export function nodeNames(nodes: readonly NodeView[]): ReadonlyMap<string, string> {
  const ids = new NodeIdShortener();
  const hosts = new Map<string, number>();
  for (const { id, host } of nodes) {
    ids.learn(id);
    hosts.set(host, (hosts.get(host) ?? 0) + 1);
  }
  const nameOf = ({ id, host }: NodeView) =>
    host === "" || host === id ? ids.shorten(id) : hosts.get(host) === 1 ? host : `${host} · ${ids.shorten(id)}`;
  return new Map(nodes.map((node) => [node.id, nameOf(node)]));
}
