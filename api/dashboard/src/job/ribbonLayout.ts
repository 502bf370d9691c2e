/** The layout of the time ribbon. Pure: times and a width in, rectangles out. */

import type { SpanView, TimelineView } from "../api/types";
import { timeScale, type Window } from "./axis";
import { look } from "./incidents/kinds";

export interface Bar {
  x: number;
  width: number;
  span: SpanView;
}

/** Pixels: a narrower loss would be invisible among hours of productive time. */
const LEAST_WIDTH = 2;

/**
 * Bars in drawing order: productive time first, losses on top, each at least two pixels wide.
 * Touching neighbours of the same kind and attempt become one bar, and of losses at the same pixel
 * the bar of the greatest weight stays. The number of bars is therefore bounded by the width,
 * whatever the number of spans.
 */
export function bars(spans: readonly SpanView[], window: Window, width: number): Bar[] {
  const scale = timeScale(window, width);
  const productive: Bar[] = [];
  const losses: Bar[] = [];
  for (const span of spans) {
    if (span.until < window.since || span.since > window.until) continue;
    const left = Math.max(0, scale(span.since));
    const right = Math.min(width, scale(span.until));
    const weight = look(span.kind).weight;
    if (weight === 0) append(productive, left, right - left, span);
    else {
      const wide = Math.max(LEAST_WIDTH, right - left);
      append(losses, Math.min(left, width - wide), wide, span);
    }
  }
  return [...productive, ...losses];
}

function append(row: Bar[], x: number, width: number, span: SpanView): void {
  const last = row[row.length - 1];
  if (last) {
    const end = last.x + last.width;
    const alike = last.span.kind === span.kind && last.span.attempt === span.attempt;
    if (alike && x <= end + 0.5) {
      last.width = Math.max(end, x + width) - last.x;
      last.span = { ...last.span, until: Math.max(last.span.until, span.until) };
      return;
    }
    if (width <= LEAST_WIDTH && x < last.x + 1 && last.width <= LEAST_WIDTH) {
      if (look(span.kind).weight > look(last.span.kind).weight) last.span = span;
      return;
    }
  }
  row.push({ x, width, span });
}

export interface Mark<T> {
  x: number;
  /** The items at this place; several where their marks would overlap. */
  items: T[];
}

/** Marks of timed items; items nearer than `apart` pixels to the first item of a mark join it. */
export function marks<T extends { at: number }>(
  items: readonly T[],
  window: Window,
  width: number,
  apart: number,
): Mark<T>[] {
  const scale = timeScale(window, width);
  const found: Mark<T>[] = [];
  const sorted = [...items].sort((a, b) => a.at - b.at);
  for (const item of sorted) {
    if (item.at < window.since || item.at > window.until) continue;
    const x = scale(item.at);
    const last = found[found.length - 1];
    if (last && x - last.x < apart) last.items.push(item);
    else found.push({ x, items: [item] });
  }
  return found;
}

export interface AttemptBand {
  attempt: number;
  x: number;
  width: number;
}

/** From the first to the last span of each attempt. */
export function attemptBands(spans: readonly SpanView[], window: Window, width: number): AttemptBand[] {
  const scale = timeScale(window, width);
  const bands = new Map<number, Window>();
  for (const span of spans) {
    if (!span.attempt) continue;
    const band = bands.get(span.attempt);
    if (!band) bands.set(span.attempt, { since: span.since, until: span.until });
    else {
      band.since = Math.min(band.since, span.since);
      band.until = Math.max(band.until, span.until);
    }
  }
  return [...bands]
    .map(([attempt, band]) => {
      const left = Math.max(0, scale(band.since));
      return { attempt, x: left, width: Math.min(width, scale(band.until)) - left };
    })
    .filter((band) => band.width > 0)
    .sort((a, b) => a.attempt - b.attempt);
}

/** Seconds of each kind within the window. */
export function secondsByKind(spans: readonly SpanView[], window: Window): Map<string, number> {
  const sums = new Map<string, number>();
  for (const span of spans) {
    const length = Math.min(span.until, window.until) - Math.max(span.since, window.since);
    if (length > 0) sums.set(span.kind, (sums.get(span.kind) ?? 0) + length);
  }
  return sums;
}

/** The span at a time; of several, the span of the greatest weight. */
export function spanAt(timeline: TimelineView, at: number): SpanView | null {
  let found: SpanView | null = null;
  for (const span of timeline.spans) {
    if (at < span.since || at > span.until) continue;
    if (!found || look(span.kind).weight > look(found.kind).weight) found = span;
  }
  return found;
}
