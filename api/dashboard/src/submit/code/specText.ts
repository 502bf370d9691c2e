/** Reads from a spec's text what starts the job's program, and writes it and `code` into the text.
 * The rest of the text, comments included, stays as it was typed. Pure. */

import { isMap, isScalar, isSeq, parseDocument, type Pair, type YAMLMap } from "yaml";
import { scalar } from "../write";

export type Starts = "script" | "function" | "command" | "ray_train" | "recipe";

export interface Program {
  key: Starts;
  /** The path of a script, `-m module`, or `module:name`; empty: not written yet. */
  entry: string;
  /** As it is written: the id of an upload, or a folder of the user's machine. */
  code: string | null;
}

export const isDigest = (code: string | null): code is string => code !== null && /^sha256:[0-9a-f]{64}$/.test(code);

/** What a text starts; null: a built-in recipe, or nothing; undefined: the text cannot be read. */
export function programOf(text: string): Program | null | undefined {
  const map = mapOf(text);
  if (!map) return isEmpty(text) ? null : undefined;
  const written = pairOf(map, "code")?.value;
  const code = isScalar(written) && written.value !== null ? String(written.value) : null;
  for (const key of ["script", "function", "command", "ray_train"] as const) {
    const value = pairOf(map, key)?.value;
    if (isScalar(value) && value.value === null && value.source !== "") continue; // `script: null`
    if (value !== undefined) return { key, entry: entryOf(key, value), code };
  }
  const recipe = pairOf(map, "recipe")?.value;
  const entry = isScalar(recipe) ? String(recipe.value) : "";
  return code !== null || entry.includes(":") ? { key: "recipe", entry, code } : null;
}

/** Whether a text names packages for the nodes. */
export const namesPackages = (text: string): boolean => pairOf(mapOf(text), "runtime_env") !== undefined;

/** The text with the id of an upload as `code`; null if that cannot be written into it. */
export const withCode = (text: string, code: string): string | null => withValue(text, "code", code, code);

/** The text with another script or function; the arguments of a script stay. Null: see above. */
export function withEntry(text: string, key: Starts, entry: string): string | null {
  const value = pairOf(mapOf(text), key)?.value;
  if (key === "script" && isSeq(value)) {
    const words = wordsOf(value);
    const [first, second] = value.items;
    const last = words[0] === "-m" && isScalar(second) ? second : first;
    if (!isScalar(first) || !isScalar(last) || !first.range || !last.range) return null;
    const wanted = [entry, ...words.slice(last === first ? 1 : 2)];
    return checked(text, spliced(text, first.range[0], last.range[1], JSON.stringify(entry)), key, wanted);
  }
  if (key !== "script") return withValue(text, key, entry, scalar(entry));
  const line = isScalar(value) && typeof value.value === "string" ? value.value : "";
  const wanted = quotedWord(entry) + line.slice((FIRST.exec(line)?.[0] ?? "").length);
  return withValue(text, key, wanted, scalar(wanted));
}

/** The first word of a line as a shell divides it, or `-m` and its module. */
const FIRST = /^\s*(?:-m\s+\S+|'[^']*'|"(?:[^"\\]|\\.)*"|\S+)/;

function entryOf(key: Starts, value: unknown): string {
  if (isSeq(value)) {
    const words = wordsOf(value);
    return key === "script" && words[0] === "-m" ? `-m ${words[1] ?? ""}` : (words[0] ?? "");
  }
  const line = isScalar(value) && value.value !== null ? String(value.value) : "";
  const first = (FIRST.exec(line)?.[0] ?? "").trim();
  if (key !== "script") return key === "command" ? first : line;
  return first.startsWith("-m") ? first.replace(/\s+/, " ") : first.replace(/^(['"])(.*)\1$/, "$2");
}

const wordsOf = (list: { items: unknown[] }): string[] => list.items.map((item) => (isScalar(item) ? String(item.value) : ""));
const quotedWord = (word: string): string => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);

function mapOf(text: string): YAMLMap | null {
  const document = parseDocument(text);
  return document.errors.length === 0 && isMap(document.contents) ? document.contents : null;
}

/** Nothing but comments. */
const isEmpty = (text: string): boolean => /^\s*(#.*\s*)*$/.test(text);

const pairOf = (map: YAMLMap | null, key: string): Pair | undefined =>
  map?.items.find((item) => isScalar(item.key) && item.key.value === key);

/** Replaces the value of a key, or adds the key after the program's. */
function withValue(text: string, key: string, value: string, plain: string): string | null {
  const map = mapOf(text);
  if (!map) return isEmpty(text) ? `${text}${text === "" || text.endsWith("\n") ? "" : "\n"}${key}: ${plain}\n` : null;
  const written = map.flow ? JSON.stringify(value) : plain;
  const present = pairOf(map, key);
  const places = present ? [replacedIn(text, present, written)] : addedTo(text, map, key, written);
  return places.map((changed) => changed && checked(text, changed, key, value)).find(Boolean) ?? null;
}

function replacedIn(text: string, pair: Pair, written: string): string | null {
  const node = pair.value;
  const key = isScalar(pair.key) ? pair.key.range : null;
  if (!key) return null;
  const range = isScalar(node) || isMap(node) || isSeq(node) ? node.range : null;
  if (!range || range[0] === range[1]) {
    const colon = text.indexOf(":", key[1]);
    return colon < 0 ? null : spliced(text, colon + 1, colon + 1, ` ${written}`);
  }
  return spliced(text, range[0], range[1], written + (text[range[1] - 1] === "\n" ? "\n" : ""));
}

function addedTo(text: string, map: YAMLMap, key: string, written: string): (string | null)[] {
  const before = ["script", "function", "command", "ray_train", "recipe", "name"].map((name) => pairOf(map, name)).find(Boolean);
  const node = before?.value;
  const end = isScalar(node) || isSeq(node) ? node.range?.[1] : undefined;
  if (map.flow) {
    const pair = `${JSON.stringify(key)}: ${written}`;
    const start = map.range?.[0] ?? 0;
    return [end === undefined ? null : spliced(text, end, end, `, ${pair}`), spliced(text, start + 1, start + 1, map.items.length > 0 ? `${pair}, ` : pair)];
  }
  const first = map.items[0]?.key;
  const from = isScalar(first) ? (first.range?.[0] ?? 0) : 0;
  const line = `${text.slice(text.lastIndexOf("\n", from - 1) + 1, from)}${key}: ${written}\n`;
  const next = end === undefined ? -1 : text[end - 1] === "\n" ? end : text.indexOf("\n", end) + 1;
  return [next > 0 ? spliced(text, next, next, line) : null, `${text}${text.endsWith("\n") ? "" : "\n"}${line}`];
}

const spliced = (text: string, start: number, end: number, by: string): string => text.slice(0, start) + by + text.slice(end);

/** `changed`, if it says the same as `text` but for this value. */
function checked(text: string, changed: string, key: string, value: unknown): string | null {
  const before = (parseDocument(text).toJS() ?? {}) as Record<string, unknown>;
  const document = parseDocument(changed);
  if (document.errors.length > 0) return null;
  const sorted = (fields: Record<string, unknown>) => JSON.stringify(Object.entries(fields).sort(([a], [b]) => (a < b ? -1 : 1)));
  return sorted(document.toJS() as Record<string, unknown>) === sorted({ ...before, [key]: value }) ? changed : null;
}
