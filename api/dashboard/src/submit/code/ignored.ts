/** Which of a folder's files are sent: the rules are those of the command line
 * (`holdfast/formats/code_archive.py`). Pure. */

import ignore from "ignore";

/** Never sent, whatever the folder's own rules say. */
export const ALWAYS_IGNORED = [
  ".git/", "__pycache__/", "*.pyc", ".venv/", "venv/", "node_modules/", ".mypy_cache/", ".ruff_cache/",
  ".pytest_cache/", ".ipynb_checkpoints/", ".DS_Store",
] as const;
/** Those of one folder are one list of rules, in this order. */
export const IGNORE_FILES = [".gitignore", ".holdfastignore"] as const;

/** A file or a whole folder (its path ends in `/`) that is not sent. */
export interface LeftOut {
  path: string;
  /** The file whose rule it matches; null: it is never sent. */
  by: string | null;
}

/** The rules of one folder for what is in it and below. */
export interface Rules {
  /** The folder: `""`, or a path that ends in `/`. */
  base: string;
  rules: ignore.Ignore;
}

/** `lines`: those of each of the folder's ignore files, by its path. */
export function rulesOf(base: string, lines: ReadonlyMap<string, readonly string[]>): Rules {
  const patterns = [...lines].flatMap(([mark, found]) => found.map((pattern) => ({ pattern, mark })));
  return { base, rules: ignore({ ignorecase: false }).add(patterns) };
}

/** What leaves out a path; null: nothing does. `rules`: those of the folders above it, none of which is left
 * out. A rule takes back another of its own folder, and none of another folder. */
export function leavesOut(rules: readonly Rules[], path: string): LeftOut | null {
  for (const { base, rules: own } of rules) {
    const { ignored, rule } = own.test(path.slice(base.length));
    if (ignored) return { path, by: rule?.mark ?? null };
  }
  return null;
}

export const NEVER: Rules = { base: "", rules: ignore({ ignorecase: false }).add(ALWAYS_IGNORED) };
