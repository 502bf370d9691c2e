/** Walks through what was chosen or dropped, and reads nothing that the ignore rules leave out. */

import { IGNORE_FILES, leavesOut, NEVER, rulesOf, type LeftOut, type Rules } from "./ignored";
import type { Chosen } from "./pack";

/** A file, or a folder that is not read yet. */
export type Entry =
  | { name: string; file: () => Promise<File> }
  | { name: string; entries: (signal: AbortSignal) => Promise<Entry[]> };

export interface Found {
  chosen: Chosen[];
  leftOut: LeftOut[];
  /** The files and folders that could not be read; they are not sent. */
  unreadable: string[];
}

/** What is sent of the entries, by path. Raises Error where an ignore file cannot be read; AbortError if it is
 * given up. */
export async function walk(entries: readonly Entry[], signal: AbortSignal): Promise<Found> {
  const found: Found = { chosen: [], leftOut: [], unreadable: [] };
  await into(found, entries, "", [NEVER], signal);
  found.chosen.sort(byPath);
  found.leftOut.sort(byPath);
  return found;
}

const byPath = (a: { path: string }, b: { path: string }): number => (a.path < b.path ? -1 : 1);

async function into(found: Found, entries: readonly Entry[], folder: string, above: readonly Rules[], signal: AbortSignal): Promise<void> {
  const own = await linesOf(entries, folder);
  const rules = own.size > 0 ? [...above, rulesOf(folder, own)] : above;
  for (const entry of entries) {
    signal.throwIfAborted();
    const path = folder + entry.name + ("entries" in entry ? "/" : "");
    const left = leavesOut(rules, path);
    if (left) {
      found.leftOut.push(left);
      continue;
    }
    const content = await ("entries" in entry ? entry.entries(signal) : entry.file()).catch(() => null);
    signal.throwIfAborted();
    if (content === null) found.unreadable.push(path);
    else if (Array.isArray(content)) await into(found, content, path, rules, signal);
    else found.chosen.push({ path, file: content });
  }
}

/** The lines of a folder's ignore files. Without them it is unknown what the user keeps secret. */
async function linesOf(entries: readonly Entry[], folder: string): Promise<Map<string, string[]>> {
  const lines = new Map<string, string[]>();
  for (const name of IGNORE_FILES) {
    const entry = entries.find((found) => found.name === name);
    if (!entry || "entries" in entry) continue;
    const path = folder + name;
    try {
      lines.set(path, (await (await entry.file()).text()).split(/\r\n|\n|\r/));
    } catch {
      throw new Error(`${path} cannot be read, so that it is unknown what to leave out: mend or remove it, and choose again.`);
    }
  }
  return lines;
}
