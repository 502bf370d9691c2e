/** Reads what the user has chosen or dropped: the files of a folder, or single files. */

import { plural } from "../../format";
import type { Bundle } from "./bundle";
import { functionsIn, isPython } from "./entries";
import type { Chosen } from "./pack";
import { walk, type Entry } from "./walk";

export interface Selection {
  bundle: Bundle;
  /** Those that are sent, in the order of the bundle. */
  chosen: readonly Chosen[];
}

/** Reads the files; raises AbortError if it is given up. */
export type Reading = (signal: AbortSignal) => Promise<Selection>;

/** Files to look for functions in, and the largest of them: others can be named in the text. */
const MOST_READ = 500;
const MOST_READ_BYTES = 2 ** 20;

/** What an `<input type="file">` has; null: nothing was chosen. */
export function ofInput(input: HTMLInputElement): Reading | null {
  const files = [...(input.files ?? [])];
  input.value = ""; // the same choice is a change again
  return files.length > 0 ? ofEntries(entriesOf(files)) : null;
}

/** What was dropped; null: no files. Must be called in the event, after which its items are gone. */
export function ofDrop(transfer: DataTransfer): Reading | null {
  const dropped = [...transfer.items].flatMap((item) => item.webkitGetAsEntry() ?? []);
  const entries = dropped.length > 0 ? dropped.map(entryOf) : entriesOf([...transfer.files]);
  return entries.length > 0 ? ofEntries(entries) : null;
}

/** One folder gives its content; otherwise all are at the top of what is sent. */
function ofEntries(entries: readonly Entry[]): Reading {
  const [first] = entries;
  const folder = first && entries.length === 1 && "entries" in first ? first : null;
  const isMixed = entries.some((entry) => "entries" in entry);
  const name = first && entries.length === 1 ? first.name : plural(entries.length, isMixed ? "file or folder" : "file", isMixed ? "files and folders" : "files");
  return async (signal) => {
    const content = await folder?.entries(signal).catch(() => {
      signal.throwIfAborted();
      throw new Error(`${name} cannot be read: check that you may read it, and choose it again.`);
    });
    return read(name, folder !== null, content ?? entries, signal);
  };
}

async function read(name: string, isFolder: boolean, entries: readonly Entry[], signal: AbortSignal): Promise<Selection> {
  const { chosen, leftOut, unreadable } = await walk(entries, signal);
  const functions = new Map<string, readonly string[] | null>();
  for (const { path, file } of chosen.filter(({ path, file }) => isPython(path) && file.size <= MOST_READ_BYTES).slice(0, MOST_READ)) {
    signal.throwIfAborted();
    const text = await file.text().catch(() => null);
    if (text === null) unreadable.push(path);
    else functions.set(path, text.includes("\0") ? null : functionsIn(text));
  }
  const unread = new Set(unreadable);
  const sent = chosen.filter(({ path }) => !unread.has(path));
  const files = sent.map(({ path, file }) => ({ path, bytes: file.size }));
  return { bundle: { name, isFolder, files, leftOut, unreadable, functions }, chosen: sent };
}

/** The tree of files whose paths an input gives. */
function entriesOf(files: readonly File[]): Entry[] {
  const folders = new Map<string, Entry[]>();
  const inside = (path: string): Entry[] => {
    const known = folders.get(path);
    if (known) return known;
    const entries: Entry[] = [];
    folders.set(path, entries);
    const above = path.lastIndexOf("/");
    if (path !== "") inside(path.slice(0, Math.max(0, above))).push({ name: path.slice(above + 1), entries: async () => entries });
    return entries;
  };
  const top = inside("");
  for (const file of files) {
    const path = file.webkitRelativePath;
    inside(path.slice(0, Math.max(0, path.lastIndexOf("/")))).push({ name: file.name, file: async () => file });
  }
  return top;
}

function entryOf(entry: FileSystemEntry): Entry {
  const { name } = entry;
  if (entry.isDirectory) return { name, entries: (signal) => entriesIn(entry as FileSystemDirectoryEntry, signal) };
  return { name, file: () => new Promise((resolve, reject) => (entry as FileSystemFileEntry).file(resolve, reject)) };
}

async function entriesIn(folder: FileSystemDirectoryEntry, signal: AbortSignal): Promise<Entry[]> {
  const reader = folder.createReader();
  const found: Entry[] = [];
  for (;;) {
    signal.throwIfAborted();
    // A part of the entries at a time; none: the end.
    const part = await new Promise<FileSystemEntry[]>((resolve, reject) => reader.readEntries(resolve, reject));
    if (part.length === 0) return found;
    for (const entry of part) found.push(entryOf(entry));
  }
}
