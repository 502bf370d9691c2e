import { expect, test } from "vitest";

import { domain, layout, peerRatios, pixels, ramp, rowAt, rowOf, shade, slowness } from "./heat";
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
  const ranks = history([1, 1, 1, 1, 1, 1.5], 20);
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

/** Ranks with equal noise in each bucket, stronger in long histories; `slow(rank, bucket)` times as slow; equal for equal seeds. */
function noisy(seed: number, ranks: number, buckets: number, slow: (rank: number, bucket: number) => number = () => 1): RankHistory {
  let state = seed + 1;
  const random = () => (state = (state * 48271) % 2147483647) / 2147483647;
  const made = history(new Array<number>(ranks).fill(1), buckets);
  for (let index = 0; index < ranks; index++) {
    const row = rowOf(made, index);
    for (let bucket = 0; bucket < buckets; bucket++) {
      const noise = Math.sqrt(-2 * Math.log(random())) * Math.cos(2 * Math.PI * random());
      row[bucket] = Math.exp((buckets >= 120 ? 0.2 : 0.1) * noise) * slow(index, bucket);
    }
  }
  return made;
}

const markedOf = (ranks: RankHistory) => {
  const { marked } = slowness(ranks, "compute_s");
  return ranks.ranks.filter((_, index) => marked[index]).map(({ rank }) => rank);
};
const WORLDS = [2, 3, 4, 8, 64].flatMap((ranks) => [20, 60, 120].map((buckets) => [ranks, buckets] as const));

test.each(WORLDS)("noise alike on all of %i ranks in %i buckets marks none", (ranks, buckets) => {
  for (let seed = 1; seed <= 20; seed++) {
    const alike = noisy(seed, ranks, buckets);
    expect([seed, markedOf(alike)]).toEqual([seed, []]);
    expect(layout(alike, slowness(alike, "compute_s"), "rank", SIZES).rows.filter((row) => row.slow !== null)).toEqual([]);
  }
});

test.each(WORLDS)("of %i ranks in %i buckets, only a straggler is marked, and its node", (ranks, buckets) => {
  for (let seed = 1; seed <= 20; seed++) {
    const always = noisy(seed, ranks, buckets, (rank) => (rank === 1 ? 1.5 : 1));
    expect([seed, markedOf(always)]).toEqual([seed, [1]]);
    const found = layout(always, slowness(always, "compute_s"), "rank", SIZES).rows.filter((row) => row.slow !== null);
    expect(found.map((row) => [row.kind, row.node])).toEqual([["node", "n0"], ["rank", "n0"]]);
    expect(markedOf(noisy(seed, ranks, buckets, (rank, bucket) => (rank === 1 && bucket >= buckets * 0.7 ? 1.8 : 1)))).toEqual([1]);
  }
});

test("all ranks of a slow node are marked, unless most of the ranks are slow", () => {
  const slowFrom = (first: number) => noisy(3, 8, 60, (rank) => (rank >= first ? 1.6 : 1));
  expect(markedOf(slowFrom(6))).toEqual([6, 7]);
  expect(markedOf(slowFrom(4))).toEqual([4, 5, 6, 7]);
  expect(markedOf(slowFrom(2))).toEqual([]);
});

test("no rank is marked without peers, or with too few values to judge it", () => {
  expect(markedOf(history([1], 60))).toEqual([]);
  expect(markedOf(history([1, 1.5], 5))).toEqual([]);
  expect(markedOf(history([1, null, 1, 1.5], 60))).toEqual([3]);
  expect(markedOf(history([null, null], 60))).toEqual([]);
  const lag = slowness(history([0, 9], 60), "lag");
  expect([lag.factor, lag.marked]).toEqual([[0, 9], [false, false]]);
});

test("a rank is compared with the others, not with itself", () => {
  expect([...peerRatios(history([1, 1.5], 1))]).toEqual([Math.fround(1 / 1.5), 1.5]);
  expect([...peerRatios(history([1, 3, 2, null], 1))]).toEqual([Math.fround(0.4), 2, 1, NaN]);
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
