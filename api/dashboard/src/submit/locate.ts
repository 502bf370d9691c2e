/** Locates the keys in a YAML or JSON text, even if the text is not well-formed yet. */

import { isMap, isNode, isScalar, isSeq, LineCounter, parseDocument } from "yaml";

export interface Place {
  /** Dotted, as the server names faults: `train.optimizer.lr`, `labels.0`. */
  path: string;
  /** From 0. */
  line: number;
  start: number;
  end: number;
}

export function locate(text: string): Place[] {
  const lines = new LineCounter();
  const found: Place[] = [];
  const add = (path: string, node: unknown) => {
    if (!isNode(node) || !node.range) return;
    const { line, col } = lines.linePos(node.range[0]);
    const length = isScalar(node) ? node.range[1] - node.range[0] : 1;
    found.push({ path, line: line - 1, start: col - 1, end: col - 1 + length });
  };
  const walk = (node: unknown, path: string) => {
    const inside = (key: string) => (path === "" ? key : `${path}.${key}`);
    if (isMap(node)) {
      for (const { key, value } of node.items) {
        const name = inside(String(isScalar(key) ? key.value : key));
        add(name, key);
        walk(value, name);
      }
    } else if (isSeq(node)) {
      node.items.forEach((item, index) => {
        add(inside(String(index)), item);
        walk(item, inside(String(index)));
      });
    }
  };
  walk(parseDocument(text, { lineCounter: lines }).contents, "");
  return found;
}

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
