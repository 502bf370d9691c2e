/** Turns metric points into the columns of a chart. Pure. */

import declared from "../api/metrics.json";
import type { MetricPage, MetricPoint } from "../api/types";
import { within, type Window } from "./axis";

export interface MetricLook {
  label: string;
  unit: string;
  /** The y axis starts at zero, so that heights are comparable. */
  from_zero: boolean;
}

/** The time of a row of a user's program, which may report every tenth step only. */
const BETWEEN_REPORTS = "time_between_reports_s";
/** What Holdfast itself measures, the most informative first; the others follow by name. */
const LOOKS = new Map<string, MetricLook>(
  declared.flatMap((look): [string, MetricLook][] =>
    look.name === "step_time_s"
      ? [[look.name, look], [BETWEEN_REPORTS, { ...look, label: "Time between reports" }]]
      : [[look.name, look]],
  ),
);
const FIRST = [...LOOKS.keys()];
const EVALUATION = "eval_";

export function metricLook(name: string): MetricLook {
  const known = LOOKS.get(name);
  if (known) return known;
  const label = name.replace(/_/g, " ");
  return { label: label[0]!.toUpperCase() + label.slice(1), unit: "", from_zero: false };
}

/** The names of the series with at least one number, the most informative first. */
export function shown(metrics: MetricPage): string[] {
  const found = metrics.names.filter(
    (name) =>
      metricLook(name).label && metrics.items.some((point) => typeof point.values[name] === "number"),
  );
  return found.sort((a, b) => place(a) - place(b) || a.localeCompare(b));
}

/** The loss of evaluations follows that of the steps; their other results, the first charts. */
function place(name: string): number {
  if (name === `${EVALUATION}loss`) return FIRST.indexOf("loss") + 0.5;
  if (name.startsWith(EVALUATION)) return FIRST.indexOf("tokens_per_second") + 0.5;
  return FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length;
}

export const hasSeries = (metrics: MetricPage): boolean => shown(metrics).length > 0;

/** A metric emitted by the training function may be missing in a step: its line continues. */
const notMeasured = (name: string) => (LOOKS.has(name) ? null : undefined);

/**
 * The metrics of a user's program, which reports some of them in some steps: a step without one has
 * no value, so that lines continue, and a series that is never measured is left out: a time of
 * Holdfast's own step loop is zero in every step.
 */
export function ofProgram(metrics: MetricPage): MetricPage {
  const renamed = (name: string) => (name === "step_time_s" ? BETWEEN_REPORTS : name);
  const measured = (name: string) =>
    LOOKS.get(name)?.unit !== "s" || metrics.items.some((point) => Boolean(point.values[name]));
  const sparse = (point: MetricPoint): MetricPoint => ({
    ...point,
    values: Object.fromEntries(
      Object.entries(point.values).filter(([, value]) => value !== null).map(([name, value]) => [renamed(name), value]),
    ),
  });
  const runs = (metrics.discarded ?? []).map((run) => ({ ...run, points: run.points.map(sparse) }));
  return { ...metrics, names: metrics.names.filter(measured).map(renamed), items: metrics.items.map(sparse), discarded: runs };
}

export type XAxis = "time" | "step";

/** The input of uPlot: x, the committed history, then a column for each discarded run of steps. */
export interface Columns {
  x: number[];
  /** Most steps of the history have no value, as between evaluations: each value is drawn as a point. */
  sparse: boolean;
  history: (number | null)[];
  discarded: { attempt: number; values: (number | null | undefined)[] }[];
}

/**
 * All columns over a common x. A column has `undefined` where it has no point (its line continues)
 * and null where the value was not measured (its line breaks), as uPlot expects.
 */
export function columns(
  metrics: MetricPage,
  name: string,
  axis: XAxis,
  window: Window | null,
): Columns {
  const at = (point: MetricPoint) => (axis === "time" ? point.at : point.step);
  const inside = (point: MetricPoint) => within(point.at, window);
  const kept = metrics.items.filter(inside);
  const runs = (metrics.discarded ?? [])
    .map((run) => ({ attempt: run.attempt, points: run.points.filter(inside) }))
    .filter((run) => run.points.length > 0);
  const xs = new Set<number>(kept.map(at));
  for (const run of runs) for (const point of run.points) xs.add(at(point));
  const x = [...xs].sort((a, b) => a - b);
  const places = new Map(x.map((value, index) => [value, index]));
  const column = (points: readonly MetricPoint[]) => {
    const values = new Array<number | null | undefined>(x.length).fill(undefined);
    for (const point of points) {
      const value = point.values[name];
      values[places.get(at(point))!] =
        typeof value === "number" ? value : value === undefined ? undefined : notMeasured(name);
    }
    return values;
  };
  const history = column(kept) as (number | null)[];
  const values = history.filter((value) => value != null).length;
  return {
    x,
    sparse: values < kept.length / 2,
    history,
    discarded: runs.map((run) => ({ attempt: run.attempt, values: column(run.points) })),
  };
}

/**
 * At most about `most` points: the first, the last, and of each bucket of steps the points with the
 * smallest and the greatest value of each of `names`, so that every spike stays, and each chart has
 * points of a series that few steps have.
 */
export function thin(
  points: readonly MetricPoint[],
  names: readonly string[],
  most: number,
): MetricPoint[] {
  if (points.length <= most) return [...points];
  const buckets = Math.max(1, Math.floor((most - 2) / (2 * names.length)));
  const kept = new Set([0, points.length - 1]);
  for (let bucket = 0; bucket < buckets; bucket++) {
    const begin = 1 + Math.floor((bucket * (points.length - 2)) / buckets);
    const end = 1 + Math.floor(((bucket + 1) * (points.length - 2)) / buckets);
    for (const name of names) for (const place of extremes(points, name, begin, end)) kept.add(place);
  }
  return [...kept].sort((a, b) => a - b).map((place) => points[place]!);
}

/** The places from `begin` to before `end` with the smallest and the greatest value. */
function extremes(points: readonly MetricPoint[], name: string, begin: number, end: number): number[] {
  let low = -1;
  let high = -1;
  for (let i = begin; i < end; i++) {
    const value = points[i]!.values[name];
    if (typeof value !== "number") continue;
    if (low < 0 || value < (points[low]!.values[name] as number)) low = i;
    if (high < 0 || value > (points[high]!.values[name] as number)) high = i;
  }
  return low < 0 ? [] : [low, high];
}

/**
 * The metrics with newer points: steps that a later attempt repeated replace the earlier steps, which
 * move to the discarded ones.
 */
export function merged(metrics: MetricPage, news: readonly MetricPoint[], most: number): MetricPage {
  if (!news.length) return metrics;
  let points = metrics.items;
  let discarded = metrics.discarded ?? [];
  for (const point of [...news].sort((a, b) => a.attempt - b.attempt || a.step - b.step)) {
    const last = points[points.length - 1];
    if (last && point.attempt === last.attempt && point.step <= last.step) continue;
    if (last && point.attempt < last.attempt) continue;
    if (last && point.step <= last.step) {
      const cut = points.findIndex((earlier) => earlier.step >= point.step);
      discarded = withDiscarded(discarded, points.slice(cut));
      points = points.slice(0, cut);
    }
    points = points === metrics.items ? [...points, point] : (points.push(point), points);
  }
  const added = news.flatMap((point) => Object.keys(point.values));
  const names = [...new Set([...metrics.names, ...added])];
  const charted = ["loss", ...names.filter((name) => !LOOKS.has(name))];
  return {
    ...metrics,
    names,
    items: points.length > most * 1.5 ? thin(points, charted, most) : points,
    discarded,
    last_step: points[points.length - 1]?.step ?? metrics.last_step,
  };
}

function withDiscarded(
  discarded: NonNullable<MetricPage["discarded"]>,
  points: readonly MetricPoint[],
): NonNullable<MetricPage["discarded"]> {
  const attempts = [...new Set(points.map((point) => point.attempt))];
  return [
    ...discarded,
    ...attempts.map((attempt) => ({
      attempt,
      points: points.filter((point) => point.attempt === attempt),
    })),
  ];
}

/**
 * The range of steps in the window, one point further on each side, if the thinned series lacks some
 * of them; null if it has them all.
 */
export function stepsWithin(
  metrics: MetricPage,
  window: Window,
): { after: number; until: number } | null {
  const points = metrics.items;
  const first = points.findIndex((point) => point.at >= window.since);
  if (first < 0) return null;
  const last = points.findLastIndex((point) => point.at <= window.until);
  const from = points[Math.max(0, first - 1)]!.step;
  const to = points[Math.min(points.length - 1, Math.max(last, first) + 1)]!.step;
  const known = Math.max(last, first) - first + 1;
  return to - from > known * 1.5 ? { after: Math.max(-1, from - 1), until: to } : null;
}

/** The index of the x nearest to `at`; -1 if `x` is empty. */
export function nearest(x: readonly number[], at: number): number {
  if (!x.length) return -1;
  let low = 0;
  let high = x.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle]! < at) low = middle + 1;
    else high = middle;
  }
  return low > 0 && at - x[low - 1]! < x[low]! - at ? low - 1 : low;
}
