/** Locates the keys in a YAML or JSON text, even if the text is not well-formed yet.
 *
 * It parses nothing else: the server validates the values. It knows block mappings and sequences by
 * their indentation, flow collections over any number of lines, and block scalars. */

export interface Place {
  /** Dotted, as the server names faults: `train.optimizer.lr`, `labels.0`. */
  path: string;
  /** From 0. */
  line: number;
  start: number;
  end: number;
}

interface Frame {
  indent: number;
  path: string;
  items: number;
  /** Whether it is an item of a sequence, which ends at the next item. */
  item: boolean;
}

const KEY = /^("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^\s#"'[\]{},&*!|>%@`-][^#:]*?)\s*:(?=\s|$)/;
const DASH = /^-(\s|$)/;

export function locate(text: string): Place[] {
  const found: Place[] = [];
  const lines = text.split("\n");
  const stack: Frame[] = [{ indent: -1, path: "", items: 0, item: false }];
  for (let line = 0; line < lines.length; line += 1) {
    const raw = lines[line] ?? "";
    let column = raw.length - raw.trimStart().length;
    if (raw.trim() === "" || raw[column] === "#" || raw.startsWith("---")) continue;
    while (stack.length > 1 && over(stack.at(-1) as Frame, column, DASH.test(raw.slice(column)))) stack.pop();
    while (DASH.test(raw.slice(column))) {
      const list = stack.at(-1) as Frame;
      const path = joined(list.path, String(list.items));
      list.items += 1;
      found.push({ path, line, start: column, end: column + 1 });
      stack.push({ indent: column, path, items: 0, item: true });
      column += 1 + (/^\s*/.exec(raw.slice(column + 1))?.[0].length ?? 0);
    }
    if (raw[column] === "{" || raw[column] === "[") {
      line = flow(lines, line, column, stack.at(-1)?.path ?? "", found);
      continue;
    }
    const key = KEY.exec(raw.slice(column));
    if (!key?.[1]) continue;
    const path = joined(stack.at(-1)?.path ?? "", bare(key[1]));
    found.push({ path, line, start: column, end: column + key[1].length });
    stack.push({ indent: column, path, items: 0, item: false });
    const value = column + key[0].length + (/^\s*/.exec(raw.slice(column + key[0].length))?.[0].length ?? 0);
    if (raw[value] === "{" || raw[value] === "[") line = flow(lines, line, value, path, found);
    else if (/^[|>][-+0-9]*\s*(#.*)?$/.test(raw.slice(value))) line = scalar(lines, line, column);
  }
  return found;
}

/** Whether a frame ends at this column. A sequence may have the same indentation as its key. */
const over = (frame: Frame, column: number, dash: boolean): boolean =>
  frame.indent > column || (frame.indent === column && !(dash && !frame.item));

/** The last line of a block scalar that starts in `line` at a key with this indentation. */
function scalar(lines: readonly string[], line: number, indent: number): number {
  let last = line;
  for (let next = line + 1; next < lines.length; next += 1) {
    const text = lines[next] ?? "";
    if (text.trim() !== "" && text.length - text.trimStart().length <= indent) break;
    last = next;
  }
  return last;
}

/** Reads a flow collection; returns the line of its end. */
function flow(lines: readonly string[], line: number, column: number, path: string, found: Place[]): number {
  const open: { path: string; map: boolean; items: number; key: string | null }[] = [];
  const token = /\s+|#.*|[{}[\],:]|"(?:[^"\\]|\\.)*"?|'(?:[^']|'')*'?|[^\s{}[\],:]+(?::[^\s{}[\],]+|[^{}[\],:#"'])*/gy;
  let at = line;
  for (; at < lines.length; at += 1) {
    const text = lines[at] ?? "";
    token.lastIndex = at === line ? column : 0;
    while (token.lastIndex < text.length) {
      const start = token.lastIndex;
      const word = token.exec(text)?.[0];
      if (word === undefined) break;
      const top = open.at(-1);
      if (word === "{" || word === "[") {
        const inside = top ? joined(top.path, top.map ? (top.key ?? "") : String(top.items)) : path;
        open.push({ path: inside, map: word === "{", items: 0, key: null });
      } else if (word === "}" || word === "]") {
        open.pop();
        if (open.length === 0) return at;
      } else if (word === "," && top) {
        top.items += 1;
        top.key = null;
      } else if (top && top.key === null && !/^[\s#:]/.test(word)) {
        const name = top.map ? bare(word.trim()) : String(top.items);
        top.key = name;
        found.push({ path: joined(top.path, name), line: at, start, end: start + word.trimEnd().length });
      }
    }
  }
  return at;
}

const joined = (path: string, key: string): string => (path === "" ? key : `${path}.${key}`);
const bare = (key: string): string => (/^["']/.test(key) ? key.slice(1).replace(/["']$/, "") : key);

/** The place of a fault at `path`: its key, else the nearest enclosing section in the text. */
export function placeOf(places: readonly Place[], path: string): Place | null {
  for (let part = path; part !== ""; part = part.includes(".") ? part.slice(0, part.lastIndexOf(".")) : "") {
    const place = places.findLast((place) => place.path === part);
    if (place) return place;
  }
  return null;
}

/** The path at the cursor: the last key that starts before it in its line, or the line's first. */
export function pathAt(places: readonly Place[], line: number, column: number): string | null {
  const here = places.filter((place) => place.line === line);
  return (here.findLast((place) => place.start <= column) ?? here[0])?.path ?? null;
}
