import { expect, test } from "vitest";
import type { NodeView } from "../api/types";
import { countNodes, nodeNames, standingOf, STANDINGS, type NodeStanding } from "./standing";

const node = (change: Partial<NodeView>): NodeView => ({
  id: "10.0.0.1", host: "10.0.0.1", state: "ready", reason: null, since: null, until: null, quarantines: 0, there: true, cpus: 8, gpus: 0,
  head: false, first_seen: 0, last_seen: 0, jobs: [], standby_of: [], findings: [], memory_gb_per_s: {}, incidents: [], ...change,
});
const finding = (level: "note" | "suspect") => ({ probe: "host", kind: "disk", level, what: "full", where: "/", code: null, lost: false, needed: 0, there: 0, at: null });

test("the counts of a small cluster add up, with a head that runs no ranks", () => {
  const nodes = [
    node({ head: true, cpus: 0 }), node({ jobs: ["a"] }), node({ standby_of: ["a"] }), node({}), node({ state: "cordoned", jobs: ["a"] }),
    node({ state: "quarantined" }), node({ there: false, jobs: ["a"] }), node({ findings: [finding("suspect")], jobs: ["a"], standby_of: ["b"] }),
  ];
  expect(countNodes(nodes)).toEqual({
    by: { ready: 3, unwell: 1, cordoned: 1, quarantined: 1, bare: 1, gone: 1 },
    there: 7, gone: 1, usable: 4, used: 3, standby: 1, excluded: 2, leaving: 1, bare: 1,
  });
});

test("of all kinds of nodes, every one is counted once", () => {
  const kinds = [true, false].flatMap((there) => (["ready", "cordoned", "quarantined"] as const).flatMap((state) => [0, 8].flatMap((cpus) =>
    [[], [finding("note")], [finding("suspect")]].flatMap((findings) => [[], ["a"]].flatMap((jobs) => [[], ["b"]].map((standby_of) =>
      node({ there, state, cpus, findings, jobs, standby_of })))))));
  for (let size = 0; size <= kinds.length; size += 7) {
    const nodes = kinds.slice(0, size);
    const counts = countNodes(nodes);
    const chips = (Object.keys(STANDINGS) as NodeStanding[]).map((standing) => counts.by[standing]);
    expect(chips).toEqual((Object.keys(STANDINGS) as NodeStanding[]).map((standing) => nodes.filter((each) => standingOf(each) === standing).length));
    expect(chips.reduce((sum, n) => sum + n)).toBe(size);
    expect(counts.there).toBe(nodes.filter((each) => each.there).length);
    expect(counts.usable + counts.excluded + counts.bare + counts.gone).toBe(size);
    expect(counts.standby).toBeLessThanOrEqual(counts.used);
    expect(counts.used).toBeLessThanOrEqual(counts.usable);
  }
});

test("nodes have short and distinct names", () => {
  const id = (start: string) => start.padEnd(56, "0");
  const nodes = [
    node({}), node({ id: "ray1", host: "127.0.0.1" }), node({ id: id("3f2a9c41aa"), host: "10.0.0.2" }), node({ id: id("3f2a9c41bb"), host: "10.0.0.2" }),
    node({ id: id("5e"), host: "" }),
  ];
  expect([...nodeNames(nodes).values()]).toEqual(["10.0.0.1", "127.0.0.1", "10.0.0.2 · 3f2a9c41a", "10.0.0.2 · 3f2a9c41b", "5e0000000"]);
});
