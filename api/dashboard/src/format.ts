/** Formats numbers and times. A value that was not measured is an en dash, never a zero. */

export const NONE = "–";

/** `90` → `1m 30s`; two units at most. */
export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  const whole = Math.max(0, seconds);
  if (whole < 1) return whole === 0 ? "0s" : `${Math.round(whole * 1000)}ms`;
  if (whole < 10) return `${Number(whole.toFixed(1))}s`;
  const total = Math.round(whole);
  const parts: [number, string][] = [
    [Math.floor(total / 86400), "d"],
    [Math.floor((total % 86400) / 3600), "h"],
    [Math.floor((total % 3600) / 60), "m"],
    [total % 60, "s"],
  ];
  const first = parts.findIndex(([count]) => count > 0);
  return parts.slice(first, first + 2).filter(([count]) => count > 0).map(([count, unit]) => `${count}${unit}`).join(" ");
}

/** Like `duration`, in whole seconds: for a time that goes on. */
export const lasting = (seconds: number | null | undefined): string =>
  seconds === null || seconds === undefined ? NONE : duration(Math.floor(seconds));

/** Like `lasting`, with the largest unit only: for ages in dense lists. */
export const roughly = (seconds: number | null | undefined): string => {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 1) return "now";
  return lasting(seconds).split(" ")[0] ?? NONE;
};

export function ago(at: number | null | undefined, now: number): string {
  if (at === null || at === undefined) return NONE;
  return now - at < 1 ? "just now" : `${lasting(now - at)} ago`;
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value: number | null | undefined): string =>
  value === null || value === undefined ? NONE : whole.format(value);

/** `12345` → `12.3K`. */
export const short = (value: number | null | undefined): string =>
  value === null || value === undefined ? NONE : value < 10_000 ? whole.format(value) : compact.format(value);

/** Four significant digits. */
export const number = (value: number | null | undefined): string => {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
};

/** Four significant digits including trailing zeros: for columns. */
export const figure = (value: number | null | undefined): string => {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : value.toPrecision(4);
};

/** Rounds down near the top: 99.99% is not 100%. */
export const percent = (share: number | null | undefined, digits = 1): string => {
  if (share === null || share === undefined) return NONE;
  const scale = 10 ** digits;
  return `${(share < 1 ? Math.floor(share * 100 * scale + 1e-9) / scale : share * 100).toFixed(digits)}%`;
};

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined) return NONE;
  let size = value;
  let unit = 0;
  while (size >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit === 0 || size >= 100 ? Math.round(size) : Number(size.toFixed(1))} ${UNITS[unit]}`;
}

const date = new Intl.DateTimeFormat("en-GB", {
  year: "numeric", month: "short", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit",
});
const time = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

/** Unix seconds as date and time in the browser's zone. */
export const moment = (at: number | null | undefined): string =>
  at === null || at === undefined ? NONE : date.format(at * 1000);
export const clock = (at: number | null | undefined): string =>
  at === null || at === undefined ? NONE : time.format(at * 1000);

export const plural = (n: number, singular: string, many = `${singular}s`): string => `${count(n)} ${n === 1 ? singular : many}`;

/** Cut in the middle: a path is known by its beginning and its end. */
export function shortened(path: string, most: number): string {
  if (path.length <= most) return path;
  const end = Math.floor((most * 2) / 3);
  return `${path.slice(0, most - 1 - end)}…${path.slice(-end)}`;
}

/** The end of an id, which is random; commands take it for the id. */
export const shortId = (id: string): string => id.slice(-8);
