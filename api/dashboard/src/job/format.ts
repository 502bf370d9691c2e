/** Text formats of the job page, in addition to those of the whole dashboard. Pure. */

import { clock as ofDay, count, duration as long, NONE, percent as share } from "../format";

export { ago, bytes, count as whole, moment, NONE, lasting as coarse } from "../format";

/** A duration, down to microseconds: a phase of a recovery may be that short. */
export function fineDuration(seconds: number | null | undefined): string {
  if (seconds == null || !Number.isFinite(seconds)) return NONE;
  if (seconds === 0) return "0s";
  if (seconds < 0.000_95) return `${significant(seconds * 1e6, 2)}µs`;
  if (seconds < 0.995) return `${significant(seconds * 1e3, 3)}ms`;
  if (seconds < 9.95) return `${significant(seconds, 2)}s`;
  return long(seconds < 60 ? Math.round(seconds) : seconds);
}

/** The time of devices, and its unit: in hours, that of a short job would be a zero. */
export function deviceTime(hours: number | null | undefined): { value: string; unit: string } {
  const seconds = (hours ?? NaN) * 3600;
  if (!(seconds < 3600)) return { value: compact(hours), unit: "device-hours" };
  return { value: seconds >= 10 ? count(seconds) : significant(seconds, 2), unit: "device-seconds" };
}

/** A number with about `digits` significant digits, with k, M, G, T: "12.4k", "0.0031", "3.1e−7". */
export function compact(value: number | null | undefined, digits = 3): string {
  if (value == null || !Number.isFinite(value)) return NONE;
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

export const finePercent = (value: number | null | undefined, digits = 1): string =>
  value != null && value > 0 && value < 10 ** (-2 - digits) ? `<${10 ** -digits}%` : share(value, digits);

/** Time of day in the browser's zone, optionally with milliseconds. */
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

/** Whole numbers as ranges, at most `most` of them: "0–3, 7". */
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

const NODE_ID = /\b[0-9a-f]{56}\b/g;
const MIN_NODE_ID_DIGITS = 8;

/** A part of a text; `full` is the whole node id where `text` is a shortened id. */
export interface TextPart {
  text: string;
  full?: string;
}

/**
 * Shortens the node ids in texts to their first digits: as many as distinguish all node ids that it
 * has learned, at least 8. Other names of nodes (host names, addresses) stay whole.
 */
export class NodeIdShortener {
  private readonly known = new Set<string>();
  private digits = MIN_NODE_ID_DIGITS;

  learn(text: string): void {
    for (const id of text.match(NODE_ID) ?? []) this.known.add(id);
    const prefixes = () => new Set([...this.known].map((id) => id.slice(0, this.digits)));
    while (prefixes().size < this.known.size) this.digits += 1;
  }

  parts(text: string): TextPart[] {
    this.learn(text);
    const parts: TextPart[] = [];
    let end = 0;
    for (const found of text.matchAll(NODE_ID)) {
      if (found.index > end) parts.push({ text: text.slice(end, found.index) });
      parts.push({ text: found[0].slice(0, this.digits), full: found[0] });
      end = found.index + found[0].length;
    }
    if (end < text.length) parts.push({ text: text.slice(end) });
    return parts;
  }

  shorten(text: string): string {
    return this.parts(text)
      .map((part) => part.text)
      .join("");
  }
}
