import type { NodeView } from "../api/types";

/** How a node is shown: its standing, unless the cluster does not have it now. */
export type Shown = "ready" | "unwell" | "cordoned" | "quarantined" | "gone";

export const STANDINGS: Record<Shown, { word: string; tone: string }> = {
  ready: { word: "Ready", tone: "is-running" },
  unwell: { word: "Unwell", tone: "is-recovering" },
  quarantined: { word: "Quarantined", tone: "is-failed" },
  cordoned: { word: "Cordoned", tone: "is-paused" },
  gone: { word: "Gone", tone: "is-cancelled" },
};

export function standingOf(node: NodeView): Shown {
  if (!node.there) return "gone";
  if (node.state !== "ready") return node.state;
  return node.findings.some((one) => one.level !== "note") ? "unwell" : "ready";
}
