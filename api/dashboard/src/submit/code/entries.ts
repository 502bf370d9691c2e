/** What a program can be started by: the Python files of a folder, and the functions in them. Pure. */

const USUAL = ["train.py", "main.py"];

export const isPython = (path: string): boolean => path.endsWith(".py");

/** The Python files at the top of the folder, the usual ones first; without any, those below. */
export function scriptsOf(paths: readonly string[]): string[] {
  const python = paths.filter(isPython);
  const top = python.filter((path) => !path.includes("/"));
  const offered = top.length > 0 ? top : python;
  return [...USUAL.filter((name) => offered.includes(name)), ...offered.filter((path) => !USUAL.includes(path))];
}

/** The script that the user most likely means, for the user to see and change; null: any could be. */
export function usualScript(scripts: readonly string[]): string | null {
  const [first] = scripts;
  return first !== undefined && (scripts.length === 1 || USUAL.includes(first)) ? first : null;
}

/** The names of the functions at the top level of a Python text; those with `_` first are its own. */
export const functionsIn = (text: string): string[] =>
  [...text.matchAll(/^(?:async )?def ([A-Za-z]\w*)\s*[([]/gm)].map((match) => match[1] ?? "");

/** `a.b` of `a/b.py`; null if no import statement can name it. */
export function moduleOf(path: string): string | null {
  const name = path.replace(/\.py$/, "").replace(/\/__init__$/, "").replaceAll("/", ".");
  return /^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$/.test(name) ? name : null;
}

/** `module:name` of every function. `names`: those of each Python file. */
export const referencesOf = (names: ReadonlyMap<string, readonly string[]>): string[] =>
  [...names].flatMap(([path, found]) => {
    const module = moduleOf(path);
    return module === null ? [] : found.map((name) => `${module}:${name}`);
  });

/** The function that the user most likely means: the only one whose name is that in the spec. */
export function usualFunction(references: readonly string[], written: string): string | null {
  const name = written.split(":")[1] ?? "main";
  const found = references.filter((reference) => reference.endsWith(`:${name}`));
  return found.length === 1 ? (found[0] ?? null) : null;
}
