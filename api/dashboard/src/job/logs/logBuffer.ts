/**
 * The part of a log that the page holds: contiguous, bounded, extended at either end. A log of a
 * gigabyte is never held as a whole; lines dropped at an end are fetched again when the user scrolls
 * there. Pure.
 */

import { rfc3339 } from "../../api/times";
import type { LogLineView } from "../../api/types";

export interface LogFilter {
  rank: number | null;
  attempt: number | null;
  level: string | null;
  grep: string;
  since: number | null;
  until: number | null;
}

export const NO_FILTER: LogFilter = {
  rank: null,
  attempt: null,
  level: null,
  grep: "",
  since: null,
  until: null,
};

export interface LogBuffer {
  lines: readonly LogLineView[];
  /** Earlier lines may exist below this line number; null: there are none. */
  before: number | null;
  /** Whether later lines may exist. */
  moreAfter: boolean;
  /** Number of the newest line that was searched, matching or not; reading continues after it. */
  seen: number;
}

export const EMPTY_LOG: LogBuffer = { lines: [], before: null, moreAfter: false, seen: 0 };
export const MAX_LINES = 6000;

/** Appends later lines, without duplicates; drops the oldest lines beyond the limit. */
export function appended(
  buffer: LogBuffer,
  lines: readonly LogLineView[],
  seen: number,
  more: boolean,
): LogBuffer {
  const newest = buffer.lines[buffer.lines.length - 1]?.line ?? 0;
  const fresh = lines.filter((line) => line.line > newest);
  const all = fresh.length ? [...buffer.lines, ...fresh] : buffer.lines;
  const dropped = Math.max(0, all.length - MAX_LINES);
  const kept = dropped ? all.slice(dropped) : all;
  return {
    lines: kept,
    before: dropped ? kept[0]!.line : buffer.before,
    moreAfter: more,
    seen: Math.max(buffer.seen, seen),
  };
}

/** Prepends earlier lines; drops the newest beyond the limit. `before`: where to continue. */
export function prepended(
  buffer: LogBuffer,
  lines: readonly LogLineView[],
  before: number | null,
): LogBuffer {
  const oldest = buffer.lines[0]?.line ?? Infinity;
  const fresh = lines.filter((line) => line.line < oldest);
  const all = [...fresh, ...buffer.lines];
  const kept = all.slice(0, MAX_LINES);
  const dropped = all.length > MAX_LINES;
  return {
    lines: kept,
    before,
    moreAfter: buffer.moreAfter || dropped,
    seen: dropped ? kept[kept.length - 1]!.line : buffer.seen,
  };
}

/** Drops the lines after `until`, and marks the end as reached. */
export function cut(buffer: LogBuffer, until: number | null): LogBuffer {
  if (until === null) return buffer;
  const end = buffer.lines.findIndex((line) => line.at > until);
  return end < 0 ? buffer : { ...buffer, lines: buffer.lines.slice(0, end), moreAfter: false };
}

/** The query parameters of a filter; `until` is applied in the browser, see `cut`. */
export function query(filter: LogFilter): URLSearchParams {
  const params = new URLSearchParams();
  if (filter.rank !== null) params.set("rank", String(filter.rank));
  if (filter.attempt !== null) params.set("attempt", String(filter.attempt));
  if (filter.level) params.set("level", filter.level);
  if (filter.grep) params.set("grep", filter.grep);
  if (filter.since !== null) params.set("since", rfc3339(filter.since));
  return params;
}

export type Level = "error" | "warning" | "info" | "debug";

const LEVELS: readonly (readonly [Level, RegExp])[] = [
  ["error", /\b(ERROR|CRITICAL|FATAL)\b|\b\w*(Error|Exception)\b:|^Traceback \(|CUDA error/],
  ["warning", /\b(WARN|WARNING)\b|\w*Warning:/],
  ["debug", /\b(DEBUG|TRACE)\b/],
];

/** The level that the server reports, otherwise a level guessed from the text of the line. */
export function level(line: LogLineView): Level {
  const reported = line.level?.toLowerCase();
  if (reported === "error" || reported === "warning" || reported === "info" || reported === "debug") return reported;
  const found = LEVELS.find(([, pattern]) => pattern.test(line.text));
  return found ? found[0] : "info";
}

export interface Piece {
  text: string;
  hit: boolean;
}

/** The line split at the matches; a single piece if the browser cannot compile the pattern. */
export function pieces(text: string, grep: string): Piece[] {
  const pattern = compiled(grep);
  if (!pattern) return [{ text, hit: false }];
  const found: Piece[] = [];
  let at = 0;
  for (const match of text.slice(0, 4000).matchAll(pattern)) {
    if (!match[0]) continue;
    if (match.index > at) found.push({ text: text.slice(at, match.index), hit: false });
    found.push({ text: match[0], hit: true });
    at = match.index + match[0].length;
    if (found.length > 60) break;
  }
  if (at < text.length) found.push({ text: text.slice(at), hit: false });
  return found;
}

/** The server uses Python's syntax; matches of the few patterns that differ are not marked. */
function compiled(grep: string): RegExp | null {
  if (!grep || grep.length > 200) return null;
  try {
    const insensitive = grep.startsWith("(?i)");
    return new RegExp(insensitive ? grep.slice(4) : grep, insensitive ? "gi" : "g");
  } catch {
    return null;
  }
}
