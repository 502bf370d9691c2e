/**
 * A chart of one series over time or steps. Steps discarded by a rollback are drawn faded and
 * dashed beside the history. Pointing moves the cursor of the whole page; dragging sets the brush.
 */

import { useEffect, useMemo, useRef, useState } from "react";
import uPlot from "uplot";

import type { MetricPage } from "../api/types";
import { colorOf, useTheme } from "../theme/theme";
import type { Window } from "./axis";
import { useCursor } from "./cursor";
import { clock, compact, NONE, whole } from "./format";
import { useWidth } from "./hooks";
import { columns, metricLook, nearest, type Columns, type XAxis } from "./series";

export interface Moment {
  at: number;
  step: number;
}

interface ChartProps {
  name: string;
  colour: string;
  metrics: MetricPage;
  axis: XAxis;
  window: Window | null;
  /** The incidents, drawn as thin lines. */
  incidents: readonly Moment[];
  onBrush: (brush: Window | null) => void;
}

const HEIGHT = 150;

export function Chart({ name, colour, metrics, axis, window, incidents, onBrush }: ChartProps) {
  const [box, width] = useWidth<HTMLDivElement>();
  const { dark } = useTheme();
  const cursor = useCursor();
  const look = metricLook(name);
  const columns_ = useMemo(
    () => columns(metrics, name, axis, window),
    [metrics, name, axis, window],
  );
  const times = useMemo(() => timesOf(metrics, axis), [metrics, axis]);
  const [pointed, setPointed] = useState<number | null>(null);
  const plot = useRef<uPlot | null>(null);
  const now = useRef({ columns: columns_, times, incidents, onBrush, axis });
  now.current = { columns: columns_, times, incidents, onBrush, axis };
  const many = columns_.discarded.length;
  const { sparse } = columns_;

  useEffect(() => {
    const element = box.current;
    if (!element || width === 0) return;
    const fromOutside = { current: false };
    let points = false; // whether the shared time is this chart's
    const created = new uPlot(
      options(width, colour, many, sparse, look.from_zero, axis, {
        incidents: () => now.current.incidents,
        pointed: (index) => {
          setPointed(index);
          // uPlot calls this for new data, too, and the time of another component must stay.
          const isHere = index !== null && created.over.matches(":hover");
          if (fromOutside.current || !(isHere || points)) return;
          points = isHere;
          cursor.set(isHere ? timeAt(now.current, index) : null, created);
        },
        brushed: (from, to) =>
          now.current.onBrush({
            since: timeNear(now.current, from),
            until: timeNear(now.current, to),
          }),
      }),
      data(now.current.columns),
      element,
    );
    plot.current = created;
    const stop = cursor.listen((at, from) => {
      if (from === created) return;
      fromOutside.current = true;
      pointAt(created, now.current, at);
      fromOutside.current = false;
    });
    return () => {
      stop();
      created.destroy();
      plot.current = null;
    };
    // Data arrives by setData below: the plot is created anew only when its appearance changes.
  }, [box, width, colour, many, sparse, look.from_zero, axis, dark, cursor]);

  useEffect(() => {
    plot.current?.setData(data(columns_));
  }, [columns_]);
  useEffect(() => plot.current?.redraw(false), [incidents]);

  const value = shownValue(columns_, pointed);
  const place = pointed === null ? null : columns_.x[pointed];
  return (
    <figure className="chart" data-metric={name}>
      <figcaption>
        <span className="chart-name">{look.label}</span>
        <span className="chart-value">
          {value === null ? NONE : compact(value, 4)}
          {look.unit && value !== null && <small> {look.unit}</small>}
        </span>
        <span className="chart-at">
          {place == null ? "latest" : axis === "time" ? clock(place) : `step ${whole(place)}`}
        </span>
      </figcaption>
      <div className="chart-box" ref={box} style={{ height: HEIGHT }} aria-hidden="true" />
      <p className="unseen">{summary(look.label, columns_, axis)}</p>
    </figure>
  );
}

/** A text alternative of the drawing, for screen readers. */
function summary(label: string, { x, history, discarded }: Columns, axis: XAxis): string {
  const known = history.filter((value): value is number => typeof value === "number");
  if (!known.length) return `${label}: no measurements.`;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const end = axis === "time" ? "" : `, steps ${x[0]} to ${x[x.length - 1]}`;
  const rollbacks = discarded.length ? ` Rollbacks discarded ${discarded.length} ${discarded.length === 1 ? "run" : "runs"} of steps.` : "";
  return `${label}${end}: from ${compact(known[0]!)} to ${compact(known[known.length - 1]!)}, between ${compact(low)} and ${compact(high)}.${rollbacks}`;
}

function shownValue({ history, discarded }: Columns, index: number | null): number | null {
  if (index === null) {
    for (let i = history.length - 1; i >= 0; i--) if (history[i] != null) return history[i]!;
    return null;
  }
  const here = history[index] ?? discarded.map((run) => run.values[index]).find((value) => value != null);
  return here ?? null;
}

interface Timed {
  columns: Columns;
  /** On an axis of steps: the steps with their times, in order. Empty on an axis of times. */
  times: readonly Moment[];
  axis: XAxis;
}

function timesOf(metrics: MetricPage, axis: XAxis): Moment[] {
  return axis === "step" ? metrics.items.map(({ step, at }) => ({ step, at })) : [];
}

function timeAt(of: Timed, index: number | null): number | null {
  const x = index === null ? undefined : of.columns.x[index];
  return x === undefined ? null : timeNear(of, x);
}

function timeNear({ axis, times }: Timed, x: number): number {
  if (axis === "time") return x;
  const found = nearest(times.map((moment) => moment.step), x);
  return times[found]?.at ?? x;
}

function pointAt(plot: uPlot, { axis, times, columns: of }: Timed, at: number | null): void {
  if (at === null || !of.x.length) {
    plot.setCursor({ left: -10, top: -10 }, false);
    plot.root.classList.remove("elsewhere");
    onHidden.get(plot)?.();
    return;
  }
  const x = axis === "time" ? at : times[nearest(times.map((moment) => moment.at), at)]?.step;
  if (x === undefined) return;
  const left = plot.valToPos(x, "x");
  if (left < 0 || left > plot.over.clientWidth) {
    plot.setCursor({ left: -10, top: -10 }, false);
    onHidden.get(plot)?.();
  } else plot.setCursor({ left, top: 0 });
}

/** uPlot fires no event when the cursor is hidden by code; these callbacks replace that event. */
const onHidden = new WeakMap<uPlot, () => void>();

function data({ x, history, discarded }: Columns): uPlot.AlignedData {
  return [x, ...discarded.map((run) => run.values), history] as uPlot.AlignedData;
}

interface Hooks {
  incidents: () => readonly Moment[];
  pointed: (index: number | null) => void;
  brushed: (from: number, to: number) => void;
}

function options(
  width: number,
  colour: string,
  discarded: number,
  sparse: boolean,
  fromZero: boolean,
  axis: XAxis,
  hooks: Hooks,
): uPlot.Options {
  const stroke = colorOf(colour);
  const faded = stroke.replace(/^rgb\((.*)\)$/, "rgba($1, 0.42)");
  const fill = stroke.replace(/^rgb\((.*)\)$/, "rgba($1, 0.07)");
  const text = colorOf("--text-3");
  const grid = colorOf("--line");
  const font = `11px ${getComputedStyle(document.body).fontFamily}`;
  const fault = colorOf("--recovering");
  return {
    width,
    height: HEIGHT,
    padding: [8, 6, 0, 0],
    legend: { show: false },
    cursor: {
      y: false,
      points: { size: 7, width: 1.5 },
      drag: { x: true, y: false, setScale: false, dist: 4 },
    },
    select: { show: true, left: 0, top: 0, width: 0, height: 0 },
    scales: {
      x: { time: axis === "time" },
      y: { range: (_plot, low, high) => yRange(low, high, fromZero) },
    },
    axes: [
      { stroke: text, font, grid: { show: false }, ticks: { stroke: grid, size: 4 }, size: 26, space: 70,
        ...(axis === "time" ? { values: (_: uPlot, at: number[]) => at.map((time) => (time % 60 ? clock(time) : clock(time).slice(0, 5))) } : { values: (_: uPlot, steps: number[]) => steps.map((step) => compact(step)) }) },
      { stroke: text, font, grid: { stroke: grid, width: 1 }, ticks: { show: false }, gap: 6, space: 34,
        size: (_plot: uPlot, labels: string[] | null) => Math.max(46, 14 + 6.5 * Math.max(0, ...(labels ?? []).map(({ length }) => length))),
        values: (_, values) => values.map((value) => compact(value)) },
    ],
    series: [
      {},
      ...Array.from({ length: discarded }, () => ({
        stroke: faded, width: 1.25, dash: [4, 3], points: { show: false }, spanGaps: false,
      })),
      { stroke, width: 1.5, fill: fromZero ? fill : undefined, points: { show: sparse, size: 4, fill: stroke }, spanGaps: false } as uPlot.Series,
    ],
    hooks: {
      init: [(plot) => onHidden.set(plot, () => hooks.pointed(null))],
      setCursor: [(plot) => hooks.pointed((plot.cursor.left ?? -1) < 0 ? null : (plot.cursor.idx ?? null))],
      setSelect: [
        (plot) => {
          const { left, width: wide } = plot.select;
          if (wide < 4) return;
          hooks.brushed(plot.posToVal(left, "x"), plot.posToVal(left + wide, "x"));
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        },
      ],
      drawClear: [(plot) => drawFaults(plot, hooks.incidents(), axis, fault)],
    },
  };
}

/** The y range with a margin above and below; from zero if the series is drawn from zero. */
function yRange(low: number | null, high: number | null, fromZero: boolean): [number, number] {
  const [least, most] = [low ?? 0, high ?? 1];
  if (fromZero && least >= 0) return [0, most > 0 ? most * 1.08 : 1];
  const margin = (most - least || Math.abs(most) || 1) * 0.08;
  return [least - margin, most + margin];
}

function drawFaults(plot: uPlot, incidents: readonly Moment[], axis: XAxis, colour: string): void {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = colour;
  ctx.globalAlpha = 0.5;
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const incident of incidents) {
    const x = Math.round(plot.valToPos(incident[axis === "time" ? "at" : "step"], "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}
