import type { NodeView } from "../api/types";

/** The displayed standing of a node; `gone`: it is not in the cluster at present. */
export type NodeStanding = "ready" | "unwell" | "cordoned" | "quarantined" | "gone";

export const STANDINGS: Record<NodeStanding, { label: string; tone: string }> = {
  ready: { label: "Ready", tone: "is-running" },
  unwell: { label: "Unhealthy", tone: "is-recovering" },
  quarantined: { label: "Quarantined", tone: "is-failed" },
  cordoned: { label: "Cordoned", tone: "is-paused" },
  gone: { label: "Gone", tone: "is-cancelled" },
};

export function standingOf(node: NodeView): NodeStanding {
  if (!node.there) return "gone";
  if (node.state !== "ready") return node.state;
  return node.findings.some((finding) => finding.level !== "note") ? "unwell" : "ready";
}
