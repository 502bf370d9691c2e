/** The scale from times to pixels, and the ticks of a time axis. Pure. */

import { clock, day } from "./format";

export interface Window {
  since: number;
  until: number;
}

export interface Scale {
  (at: number): number;
  invert(x: number): number;
}

/** Linear, without clamping; an empty window gets a minimal length. */
export function timeScale(window: Window, width: number): Scale {
  const length = Math.max(window.until - window.since, 1e-6);
  const scale = (at: number) => ((at - window.since) / length) * width;
  return Object.assign(scale, {
    invert: (x: number) => window.since + (x / Math.max(width, 1)) * length,
  });
}

const STEPS_S = [
  0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600,
  900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800,
];

export interface Tick {
  at: number;
  label: string;
}

/** Ticks at round times in the browser's time zone, at least about `apart` pixels apart. */
export function ticks(window: Window, width: number, apart = 110): Tick[] {
  const length = window.until - window.since;
  if (!(length > 0) || width <= 0) return [];
  const wanted = length / Math.max(1, Math.floor(width / apart));
  const step = STEPS_S.find((seconds) => seconds >= wanted) ?? STEPS_S[STEPS_S.length - 1]!;
  const zone = step >= 3600 ? new Date(window.since * 1000).getTimezoneOffset() * 60 : 0;
  const found: Tick[] = [];
  let at = Math.ceil((window.since - zone) / step) * step + zone;
  for (; at <= window.until && found.length < 200; at += step) {
    found.push({ at, label: label(at, step) });
  }
  return found;
}

function label(at: number, step: number): string {
  if (step >= 86400) return day(at);
  if (step < 1) return clock(at, true).slice(3);
  const text = clock(at);
  if (text === "00:00:00") return day(at);
  return step >= 60 ? text.slice(0, 5) : text;
}

/** The part of `wanted` inside `whole`, with its ends in order; null if that part is empty. */
export function clipped(wanted: Window, whole: Window): Window | null {
  const since = Math.max(Math.min(wanted.since, wanted.until), whole.since);
  const until = Math.min(Math.max(wanted.since, wanted.until), whole.until);
  return until > since ? { since, until } : null;
}

export function within(at: number, window: Window | null): boolean {
  return window === null || (at >= window.since && at <= window.until);
}
