/** The rank × time heatmap: its order, grouping and colours. Pure. */

import type { RankMeasure } from "../../api/types";
import type { RankHistory } from "../views";

export type Order = "stragglers" | "rank";

/** A line of the heatmap: the name of a node, or a rank on it. `slow`: the factor of a marked rank, or
 * of the slowest marked rank of the node; null: no mark. */
export type Row =
  | { kind: "node"; node: string; ranks: number[]; slow: number | null; y: number; height: number }
  | { kind: "rank"; rank: number; index: number; node: string; slow: number | null; y: number; height: number };

export interface Layout {
  rows: Row[];
  height: number;
  /** The indexes in `rows` of the ranks, in order. */
  rankRows: number[];
}

export interface Sizes {
  rank: number;
  node: number;
  gap: number;
}

/** A rank at this factor of its peers may be slow; equals the straggler detector's default. */
export const SLOW = 1.2;
/** So many measured buckets in a row count as one moment: noise differs between them, slowness does
 * not. */
const MOMENT = 5;
/** With fewer measured buckets, noise and slowness look alike. */
const MIN_BUCKETS = 20;
/** A factor that is so many times as far above the median of the others as their lower quartile is
 * below it stands out of their noise. */
const CLEAR = 5;

/** The slowness of the ranks compared with their peers, by index. */
export interface Slowness {
  /** The mean ratio to the median of the other ranks in the slowest tenth of the rank's time: a slow
   * phase of all ranks makes no rank slow, and a slow hour of a rank stays visible in a normal day.
   * For a lag: the mean lag in that tenth. 1 (for a lag: 0) without measurements. */
  factor: number[];
  /** Whether the rank is an outlier among its peers, and not only as noisy as they are. */
  marked: boolean[];
  /** Whether a marked rank is slow in the last tenth; such ranks come first. */
  now: boolean[];
}

export function slowness(history: RankHistory, of: RankMeasure, ratios = peerRatios(history)): Slowness {
  const lag = of === "lag";
  const values = lag ? history.values : ratios;
  const factor: number[] = [];
  const recent: number[] = [];
  const judged: boolean[] = [];
  for (let index = 0; index < history.ranks.length; index++) {
    const row = values.subarray(index * history.buckets, (index + 1) * history.buckets);
    const known = row.filter(Number.isFinite);
    const moments = momentsOf(known);
    const tenth = Math.max(1, Math.round(moments.length / 10));
    recent.push(mean(moments.subarray(-tenth)));
    factor.push(moments.length ? mean(moments.sort().subarray(-tenth)) : lag ? 0 : 1);
    judged.push(!lag && known.length >= MIN_BUCKETS);
  }
  const isOutlier = outliers(factor.filter((_, index) => judged[index]));
  const marked = factor.map((value, index) => judged[index]! && isOutlier(value));
  return { factor, marked, now: marked.map((mark, index) => mark && recent[index]! >= SLOW) };
}

/** Decides whether a rank's factor is clearly above those of the others. */
function outliers(factors: readonly number[]): (factor: number) => boolean {
  const sorted = [...factors].sort((a, b) => a - b);
  return (factor) => {
    if (factor < SLOW || sorted.length < 2) return false;
    const at = sorted.indexOf(factor);
    const middle = quantile(sorted, 0.5, at);
    return factor >= SLOW * middle && factor >= middle + CLEAR * (middle - quantile(sorted, 0.25, at));
  };
}

/** The means over each `MOMENT` consecutive values. */
function momentsOf(values: Float32Array): Float32Array {
  const width = Math.min(MOMENT, values.length);
  return Float32Array.from({ length: values.length - width + (width && 1) }, (_, at) => mean(values.subarray(at, at + width)));
}

/** The values of a rank, by bucket. */
export const rowOf = ({ values, buckets }: RankHistory, index: number): Float32Array =>
  values.subarray(index * buckets, (index + 1) * buckets);

function mean(values: Float32Array): number {
  let sum = 0;
  for (const value of values) sum += value;
  return sum / Math.max(1, values.length);
}

/** The values of a bucket that were measured, ascending. `room`: for one value of each rank. */
function sortedColumn({ values, buckets }: RankHistory, bucket: number, room: Float32Array): Float32Array {
  let count = 0;
  for (let at = bucket; at < values.length; at += buckets) {
    const value = values[at]!;
    if (!Number.isNaN(value)) room[count++] = value;
  }
  return room.subarray(0, count).sort();
}

/** The median over ranks, per bucket; NaN where no rank has a value. */
export function medians(history: RankHistory): Float64Array {
  const { buckets, ranks } = history;
  const found = new Float64Array(buckets).fill(NaN);
  const column = new Float32Array(ranks.length);
  for (let bucket = 0; bucket < buckets; bucket++) {
    const sorted = sortedColumn(history, bucket, column);
    if (sorted.length) found[bucket] = quantile(sorted, 0.5);
  }
  return found;
}

/** Each value relative to the median of the other ranks in its bucket; NaN where that is unknown. */
export function peerRatios(history: RankHistory): Float32Array {
  const { values, buckets, ranks } = history;
  const found = new Float32Array(values.length).fill(NaN);
  const column = new Float32Array(ranks.length);
  for (let bucket = 0; bucket < buckets; bucket++) {
    const sorted = sortedColumn(history, bucket, column);
    if (sorted.length < 2) continue;
    for (let at = bucket; at < values.length; at += buckets) {
      const value = values[at]!;
      if (!Number.isNaN(value)) found[at] = value / quantile(sorted, 0.5, place(sorted, value));
    }
  }
  return found;
}

/** The index of a value that is in the sorted list. */
function place(sorted: Float32Array, value: number): number {
  let low = 0;
  let high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle]! < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** `without`: the index of a value to leave out. */
export function quantile(sorted: ArrayLike<number>, share: number, without = sorted.length): number {
  const last = sorted.length - (without < sorted.length ? 2 : 1);
  const value = (index: number) => sorted[index < without ? index : index + 1]!;
  const low = Math.floor(last * share);
  const high = Math.ceil(last * share);
  return value(low) + (value(high) - value(low)) * (last * share - low);
}

/**
 * Groups the ranks by node. `stragglers` sorts nodes by their slowest rank, and ranks within a node
 * alike: ranks that are slow now precede ranks that were slow earlier, and a difference below a
 * twentieth counts as noise.
 */
export function layout(
  history: RankHistory,
  slow: Slowness,
  order: Order,
  sizes: Sizes,
  only?: (rank: number, node: string) => boolean,
): Layout {
  const nodes = new Map<string, number[]>();
  history.ranks.forEach(({ rank, node }, index) => {
    if (only && !only(rank, node)) return;
    const members = nodes.get(node);
    if (members) members.push(index);
    else nodes.set(node, [index]);
  });
  const rounded = (index: number) =>
    Math.round((slow.factor[index] ?? 0) * 20) + (slow.now[index] ? 10_000 : 0);
  const rankOf = (index: number) => history.ranks[index]!.rank;
  const worst = (members: number[]) => Math.max(...members.map(rounded));
  const first = (members: number[]) => Math.min(...members.map(rankOf));
  const groups = [...nodes].sort(
    ([, a], [, b]) =>
      (order === "stragglers" ? worst(b) - worst(a) : 0) || first(a) - first(b),
  );
  const rows: Row[] = [];
  const rankRows: number[] = [];
  let y = 0;
  for (const [node, members] of groups) {
    members.sort(
      (a, b) =>
        (order === "stragglers" ? rounded(b) - rounded(a) : 0) || rankOf(a) - rankOf(b),
    );
    const marks = members.filter((index) => slow.marked[index]).map((index) => slow.factor[index]!);
    if (sizes.node > 0) {
      rows.push({ kind: "node", node, ranks: members.map(rankOf), slow: marks.length ? Math.max(...marks) : null, y, height: sizes.node });
      y += sizes.node;
    }
    for (const index of members) {
      rankRows.push(rows.length);
      rows.push({
        kind: "rank",
        rank: rankOf(index),
        index,
        node,
        slow: slow.marked[index] ? slow.factor[index]! : null,
        y,
        height: sizes.rank,
      });
      y += sizes.rank;
    }
    y += sizes.gap;
  }
  return { rows, height: Math.max(0, y - sizes.gap), rankRows };
}

/** The index of the first row that ends below `y`: drawing starts there. */
export function rowAt(rows: readonly Row[], y: number): number {
  let low = 0;
  let high = rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    const row = rows[middle]!;
    if (row.y + row.height <= y) low = middle + 1;
    else high = middle;
  }
  return low;
}

export interface Domain {
  low: number;
  high: number;
}

/**
 * The values at the ends of the colour scale. For times: from slightly below the median to at least
 * 1.6 times the median, so that noise stays pale and a straggler at 1.5 stands out however even the
 * other ranks are.
 */
export function domain({ values }: RankHistory, of: RankMeasure): Domain {
  const all = sample(values, 20_000).sort();
  if (!all.length) return { low: 0, high: 1 };
  if (of === "lag") return { low: 0, high: Math.max(1, Math.ceil(quantile(all, 0.999))) };
  const middle = quantile(all, 0.5);
  const low = Math.min(quantile(all, 0.02), middle * 0.9);
  return { low, high: Math.max(middle * 1.6, Math.min(quantile(all, 0.999), middle * 4)) };
}

function sample(values: Float32Array, most: number): Float32Array {
  const stride = Math.max(1, Math.floor(values.length / most));
  const found = new Float32Array(Math.ceil(values.length / stride));
  let count = 0;
  for (let at = 0; at < values.length; at += stride) {
    if (Number.isFinite(values[at])) found[count++] = values[at]!;
  }
  return found.subarray(0, count);
}

export type Rgb = readonly [number, number, number];

/** 256 colours between the stops, blended in linear light to keep the middle colours bright. */
export function ramp(stops: readonly Rgb[]): Uint8ClampedArray {
  const table = new Uint8ClampedArray(256 * 3);
  for (let i = 0; i < 256; i++) {
    const at = (i / 255) * (stops.length - 1);
    const from = stops[Math.floor(at)]!;
    const to = stops[Math.min(stops.length - 1, Math.floor(at) + 1)]!;
    const share = at - Math.floor(at);
    for (let part = 0; part < 3; part++) {
      const mixed = linear(from[part]!) * (1 - share) + linear(to[part]!) * share;
      table[i * 3 + part] = Math.round(gamma(mixed));
    }
  }
  return table;
}

const linear = (byte: number) => (byte / 255) ** 2.2;
const gamma = (light: number) => 255 * light ** (1 / 2.2);

/** The index of a value in the ramp, 0 to 255. */
export function shade(value: number, scale: Domain): number {
  const share = (value - scale.low) / Math.max(scale.high - scale.low, 1e-12);
  return Math.round(255 * Math.min(1, Math.max(0, share)));
}

/** RGBA pixels, one per value; a value that was not measured is transparent. */
export function pixels(
  values: Float32Array,
  scale: Domain,
  table: Uint8ClampedArray,
): Uint8ClampedArray<ArrayBuffer> {
  const image = new Uint8ClampedArray(new ArrayBuffer(values.length * 4));
  for (let index = 0; index < values.length; index++) {
    const value = values[index]!;
    if (Number.isNaN(value)) continue;
    const colour = shade(value, scale) * 3;
    const at = index * 4;
    image[at] = table[colour]!;
    image[at + 1] = table[colour + 1]!;
    image[at + 2] = table[colour + 2]!;
    image[at + 3] = 255;
  }
  return image;
}

/** A computed colour, `rgb(1, 2, 3)`, as numbers. */
export function rgb(colour: string): Rgb {
  const parts = colour.match(/[\d.]+/g)?.map(Number) ?? [];
  return parts.length >= 3 ? [parts[0]!, parts[1]!, parts[2]!] : [128, 128, 128];
}
