/** The chosen files, what is wrong with them, and what they can start. Pure. */

import { bytes, count, plural } from "../../format";
import { isPython, referencesOf, scriptsOf, usualFunction, usualScript } from "./entries";
import type { LeftOut } from "./ignored";
import type { Program } from "./specText";

/** Limits of the command line; a server may allow less. */
export const MAX_PACKED_BYTES = 32 * 2 ** 20;
export const MAX_BYTES = 20 * MAX_PACKED_BYTES;
export const MAX_FILES = 10_000;
const LISTED_FILES = 5;

export interface Sized {
  path: string;
  bytes: number;
}

/** Files that were chosen together. */
export interface Bundle {
  /** That of the folder or the file. */
  name: string;
  isFolder: boolean;
  files: readonly Sized[];
  leftOut: readonly LeftOut[];
  /** What could not be read, which is not sent. */
  unreadable: readonly string[];
  /** The functions of each Python file; null: the file is not text. */
  functions: ReadonlyMap<string, readonly string[] | null>;
}

export const bytesOf = (files: readonly Sized[]): number => files.reduce((sum, file) => sum + file.bytes, 0);

export const largest = (files: readonly Sized[]): Sized[] => [...files].sort((a, b) => b.bytes - a.bytes).slice(0, LISTED_FILES);

/** Why the files cannot be sent for this program, and what to do; null: they can. */
export function obstacle(bundle: Bundle, program: Program | null): string | null {
  const { files, leftOut, unreadable, name, isFolder } = bundle;
  if (files.length === 0 && unreadable.length > 0) return `Nothing in ${name} can be read: check that you may read it, and choose it again.`;
  if (files.length === 0 && leftOut.length > 0) {
    return isFolder || leftOut.some(({ by }) => by !== null)
      ? `${name} contains nothing but ignored files: change its .gitignore or .holdfastignore, or choose others.`
      : `${name} is never sent: choose your script, or the folder that contains it.`;
  }
  if (bytesOf(files) === 0) return `${name} is empty: choose the file or folder that contains your code.`;
  if (files.length > MAX_FILES) {
    return `${name} has ${count(files.length)} files, and ${count(MAX_FILES)} can be sent: leave out what training does not need by a .holdfastignore file, and choose it again.`;
  }
  if (bytesOf(files) > MAX_BYTES) return tooLarge(bundle, MAX_BYTES, "before packing");
  if (program === null || program.key === "command" || program.key === "recipe" || program.entry.startsWith("-m ")) return null;
  if (!files.some(({ path }) => isPython(path))) {
    return isFolder
      ? `${name} has no Python file (.py): choose the folder that contains your code.`
      : `${name} is not a Python file (.py): choose your script, or the folder that contains it.`;
  }
  return program.key === "script" ? obstacleOfScript(bundle, program.entry) : null;
}

export function tooLarge({ name, files }: Pick<Bundle, "name" | "files">, limit: number, when: string): string {
  const listed = largest(files).map((file) => `${file.path} (${bytes(file.bytes)})`).join(", ");
  return `${name} is larger than ${bytes(limit)} ${when}. Leave out what training does not need by a .holdfastignore file, and choose it again; the largest are ${listed}.`;
}

function obstacleOfScript({ files, functions }: Bundle, entry: string): string | null {
  if (entry === "") return "Choose the file to start.";
  if (!files.some(({ path }) => path === entry)) return `${entry} is not among the chosen files: choose the file to start.`;
  return functions.get(entry) === null ? `${entry} is not a text file: choose another file to start.` : null;
}

/** What is not sent although no rule leaves it out; null: nothing. */
export function unsent({ unreadable }: Bundle): string | null {
  if (unreadable.length === 0) return null;
  const listed = unreadable.slice(0, LISTED_FILES).join(", ");
  const more = unreadable.length > LISTED_FILES ? ` and ${count(unreadable.length - LISTED_FILES)} more` : "";
  return `Not sent, because it cannot be read: ${listed}${more}. If the program needs it, check that you may read it, and choose again.`;
}

/** What the user should check before the upload; null: nothing was noticed. `installs`: the spec names
 * packages. */
export function remark(bundle: Bundle, program: Program, installs: boolean): string | null {
  const isFunction = program.key === "function" || program.key === "ray_train";
  const offered = choices(bundle, program);
  if (isFunction && !offered.includes(program.entry)) {
    return `No function ${program.entry} was found in the files: ${offered.length > 0 ? "choose one, or write it into the text" : "choose the file that has it"}.`;
  }
  if (!installs && bundle.files.some((file) => file.path === "requirements.txt")) {
    return "The nodes install nothing from requirements.txt: write the packages that they lack as runtime_env: {pip: [...]}.";
  }
  return null;
}

/** What the files offer to start the program by. */
export function choices({ files, functions }: Bundle, program: Program): string[] {
  if (program.key === "script") return scriptsOf(files.map((file) => file.path));
  if (program.key !== "function" && program.key !== "ray_train") return [];
  return referencesOf(new Map([...functions].map(([path, names]) => [path, names ?? []])));
}

/** What to write into the spec when these files are chosen; null: what it has stays. */
export function proposal(bundle: Bundle, program: Program): string | null {
  const offered = choices(bundle, program);
  const { entry } = program;
  if (program.key === "script") {
    const isThere = entry.startsWith("-m ") || bundle.files.some((file) => file.path === entry);
    return isThere ? null : usualScript(offered);
  }
  return offered.includes(entry) ? null : usualFunction(offered, entry);
}

/** `3 files, 34 KiB`. */
export const sizeOf = (files: readonly Sized[]): string => `${plural(files.length, "file")}, ${bytes(bytesOf(files))}`;
