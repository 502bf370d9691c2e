import { expect, test } from "vitest";

import { domain, layout, pixels, ramp, rowAt, rowOf, shade, slowness } from "./heat";
import type { RankHistory } from "../views";

const SIZES = { rank: 10, node: 20, gap: 5 };

/** Ranks on nodes of two, each with its constant time. */
function history(times: readonly (number | null)[], buckets = 4): RankHistory {
  return {
    since: 0,
    until: buckets,
    bucket_s: 1,
    buckets,
    ranks: times.map((_, rank) => ({ rank, node: `n${rank >> 1}` })),
    values: Float32Array.from(times.flatMap((time) => new Array<number>(buckets).fill(time ?? NaN))),
  };
}

const ranksOf = (found: ReturnType<typeof layout>) =>
  found.rows.flatMap((row) => (row.kind === "rank" ? [row.rank] : []));

test("the slowest rank comes first, and its node before the others", () => {
  const ranks = history([1, 1, 1, 1, 1, 1.5]);
  const found = layout(ranks, slowness(ranks, "compute_s"), "stragglers", SIZES);
  expect(ranksOf(found)).toEqual([5, 4, 0, 1, 2, 3]);
  expect(found.rows[0]).toMatchObject({ kind: "node", node: "n2", slow: 1.5 });
});

test("a rank that is slow now comes before a rank that was slower earlier", () => {
  const ranks = history([1, 1, 1, 1, 1, 1], 20);
  rowOf(ranks, 1).fill(3, 0, 5);
  rowOf(ranks, 4).fill(1.5, 15);
  expect(ranksOf(layout(ranks, slowness(ranks, "compute_s"), "stragglers", SIZES)).slice(0, 3)).toEqual([4, 5, 1]);
});

test("a slow phase of all ranks marks no rank as slow", () => {
  const ranks = history([1, 1, 1]);
  ranks.ranks.forEach((_, index) => (rowOf(ranks, index)[2] = 9));
  expect(slowness(ranks, "compute_s").factor).toEqual([1, 1, 1]);
});

test("by rank, noise does not change the order", () => {
  const ranks = history([1, 1.4, 1, 1.2]);
  expect(ranksOf(layout(ranks, slowness(ranks, "compute_s"), "rank", SIZES))).toEqual([0, 1, 2, 3]);
});

test("rows have gaps only between nodes, and are found by their height", () => {
  const ranks = history([1, 1, 1, 1]);
  const found = layout(ranks, slowness(ranks, "compute_s"), "rank", SIZES);
  expect(found.height).toBe(2 * (20 + 2 * 10) + 5);
  expect(found.rows[rowAt(found.rows, 41)]).toMatchObject({ kind: "node", node: "n1" });
  expect(found.rows[rowAt(found.rows, 25)]).toMatchObject({ kind: "rank", rank: 0 });
});

test("noise stays pale and a straggler stands out", () => {
  const even = history(Array.from({ length: 64 }, (_, rank) => 1 + (rank % 7) / 300));
  const scale = domain(even, "compute_s");
  expect(shade(1.02, scale)).toBeLessThan(60);
  expect(shade(1.6, scale)).toBeGreaterThan(240);
});

test("an image has a pixel for each value, transparent where nothing was measured", () => {
  const table = ramp([[0, 0, 0], [255, 255, 255]]);
  const image = pixels(Float32Array.of(0, NaN, 1, 0.5), { low: 0, high: 1 }, table);
  expect([...image]).toHaveLength(16);
  expect([...image.slice(0, 8)]).toEqual([0, 0, 0, 255, 0, 0, 0, 0]);
  expect(image[8]).toBe(255);
});
