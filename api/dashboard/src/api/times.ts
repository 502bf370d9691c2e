/** Times: RFC 3339 in JSON, Unix seconds in this program. */

const NAMES: ReadonlySet<string> = new Set(["at", "since", "until", "server_time", "first_seen", "last_seen"]);
const RFC3339 = /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.(\d{6})Z$/;

const isName = (key: string): boolean => NAMES.has(key) || key.endsWith("_at");

/** Unix seconds of a time as the server writes it, to the microsecond; null for another text. */
export function seconds(text: string): number | null {
  const fraction = RFC3339.exec(text)?.[1];
  if (fraction === undefined) return null;
  return Date.parse(`${text.slice(0, 19)}Z`) / 1000 + Number(fraction) / 1e6;
}

/** Whether a number of Unix seconds is a time that `rfc3339` can write. */
export const isTime = (unix_s: number): boolean => !Number.isNaN(new Date(unix_s * 1000).getTime());

export const rfc3339 = (unix_s: number): string => new Date(unix_s * 1000).toISOString();

/** JSON of the API, with its times as Unix seconds. */
export const parsed = <T>(text: string): T => withSeconds<T>(JSON.parse(text));

/** The same for a value that was parsed as plain JSON. */
export function withSeconds<T>(value: unknown, key = ""): T {
  if (typeof value === "string" && isName(key)) return (seconds(value) ?? value) as T;
  if (Array.isArray(value)) return value.map((item) => withSeconds(item)) as T;
  if (value === null || typeof value !== "object") return value as T;
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, withSeconds(item, name)])) as T;
}
