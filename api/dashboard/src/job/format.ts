/** What the job page writes beside the formats of the whole dashboard. Pure. */

import { clock as ofDay, count, duration as long, percent as share } from "../format";

export { ago, bytes, count as whole, moment, roughly as coarse } from "../format";

/** What stands where nothing was measured: never a zero. */
export const UNKNOWN = "–";

/** A length of time, down to microseconds: a phase of a recovery may be that short. */
export function duration(seconds: number | null | undefined): string {
  if (seconds == null || !Number.isFinite(seconds)) return UNKNOWN;
  if (seconds === 0) return "0s";
  if (seconds < 0.000_95) return `${significant(seconds * 1e6, 2)}µs`;
  if (seconds < 0.995) return `${significant(seconds * 1e3, 3)}ms`;
  if (seconds < 9.95) return `${significant(seconds, 2)}s`;
  return long(seconds < 60 ? Math.round(seconds) : seconds);
}

/** A number in about `digits` significant ones, with k, M, G, T: "12.4k", "0.0031", "3.1e−7". */
export function compact(value: number | null | undefined, digits = 3): string {
  if (value == null || !Number.isFinite(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-4) return value.toExponential(Math.max(0, digits - 2)).replace("e-", "e−");
  for (const [unit, name] of UNITS) {
    if (size >= unit * 0.9995) return significant(value / unit, digits) + name;
  }
  return significant(value, digits);
}

const UNITS: readonly (readonly [number, string])[] = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

function significant(value: number, digits: number): string {
  return String(Number(value.toPrecision(digits)));
}

export const percent = (value: number | null | undefined, digits = 1): string =>
  value != null && value > 0 && value < 10 ** (-2 - digits) ? `<${10 ** -digits}%` : share(value, digits);

/** Time of day in the reader's zone, with milliseconds if asked for. */
export function clock(at: number, milliseconds = false): string {
  const text = ofDay(at);
  return milliseconds ? `${text}.${String(Math.floor((at % 1) * 1000)).padStart(3, "0")}` : text;
}

/** The day, as "11-22". */
export function day(at: number): string {
  const when = new Date(at * 1000);
  const two = (value: number) => String(value).padStart(2, "0");
  return `${two(when.getMonth() + 1)}-${two(when.getDate())}`;
}

/** Whole numbers as few ranges: "0–3, 7". */
export function ranges(numbers: readonly number[], most = 6): string {
  const sorted = [...new Set(numbers)].sort((a, b) => a - b);
  const parts: string[] = [];
  let start = 0;
  for (let i = 1; i <= sorted.length; i++) {
    if (i < sorted.length && sorted[i] === sorted[i - 1]! + 1) continue;
    const [first, last] = [sorted[start]!, sorted[i - 1]!];
    parts.push(first === last ? `${first}` : `${first}–${last}`);
    start = i;
  }
  if (parts.length <= most) return parts.join(", ");
  return `${parts.slice(0, most).join(", ")} and ${count(parts.length - most)} more`;
}
