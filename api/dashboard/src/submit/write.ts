/** Writes a value as YAML that is easy to edit: sections as blocks, short sections in a line. */

import { isMapping } from "./schema";

const WIDTH = 78;
const PLAIN = /^[A-Za-z_/][\w./+ -]*$/;
const RESERVED = new Set(["null", "true", "false", "yes", "no", "on", "off", "y", "n", "~"]);

export function yaml(value: Record<string, unknown>): string {
  return Object.entries(value).map(([key, field]) => entry(key, field, 0)).join("");
}

function entry(key: string, value: unknown, depth: number): string {
  const head = `${"  ".repeat(depth)}${scalar(key)}:`;
  const inline = `${head} ${short(value)}`;
  if (!isMapping(value) || Object.keys(value).length === 0) return `${inline}\n`;
  if (inline.length <= WIDTH && (depth > 0 || isFlat(value))) return `${inline}\n`;
  return `${head}\n${Object.entries(value).map(([name, field]) => entry(name, field, depth + 1)).join("")}`;
}

function short(value: unknown): string {
  if (Array.isArray(value)) return `[${value.map(short).join(", ")}]`;
  if (isMapping(value)) return `{${Object.entries(value).map(([key, field]) => `${scalar(key)}: ${short(field)}`).join(", ")}}`;
  return scalar(value);
}

/** A single value. */
export function scalar(value: unknown): string {
  if (typeof value === "number") return number(value);
  if (typeof value !== "string") return String(value);
  return PLAIN.test(value) && !RESERVED.has(value.toLowerCase()) && value === value.trim() ? value : quoted(value);
}

/** Readers of YAML replace or refuse these characters; JSON does not escape them. */
const quoted = (text: string): string => JSON.stringify(text).replace(
  /[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]/g, (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`,
);

/** YAML 1.1 reads `3e-7` as text: a number needs a decimal point. The server refuses larger integers. */
const number = (value: number): string =>
  (Math.abs(value) > Number.MAX_SAFE_INTEGER ? value.toExponential() : String(value)).replace(/^(-?\d+)e/, "$1.0e");

const isFlat = (value: Record<string, unknown>): boolean => !Object.values(value).some(isMapping);
