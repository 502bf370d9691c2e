/** A spec as lines with paths, for reading and for comparing. Pure. */

import type { SpecDifference } from "./views";

export interface SpecLine {
  path: string;
  key: string;
  depth: number;
  /** Null of a section: its keys follow. */
  value: string | null;
}

/** Sections in the order of the document, scalars before the sections beside them. */
export function lines(value: unknown, path = "", depth = 0): SpecLine[] {
  if (!isSection(value)) return [];
  const entries = Object.entries(value);
  const flat = entries.filter(([, one]) => !isSection(one));
  const deep = entries.filter(([, one]) => isSection(one));
  return [...flat, ...deep].flatMap(([key, one]) => {
    const here = path ? `${path}.${key}` : key;
    const section = isSection(one);
    const line: SpecLine = { path: here, key, depth, value: section ? null : written(one) };
    return section ? [line, ...lines(one, here, depth + 1)] : [line];
  });
}

function isSection(value: unknown): value is Record<string, unknown> {
  return (
    typeof value === "object" &&
    value !== null &&
    !Array.isArray(value) &&
    Object.keys(value).length > 0
  );
}

/** As YAML would have it in one line. */
export function written(value: unknown): string {
  if (value === undefined) return "";
  if (value === null) return "null";
  if (typeof value === "string") {
    return value === "" || /^[\s\d\-[{&*!|>'"%@`]|[:#]\s|^(true|false|null|yes|no)$|\s$/i.test(value)
      ? JSON.stringify(value)
      : value;
  }
  return JSON.stringify(value);
}

/** YAML of the whole. */
export function yaml(spec: unknown): string {
  return lines(spec)
    .map((line) => `${"  ".repeat(line.depth)}${line.key}:${line.value === null ? "" : ` ${line.value}`}\n`)
    .join("");
}

/** Lines whose path or value has the text. Sections above a match stay. */
export function matching(all: readonly SpecLine[], text: string): SpecLine[] {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return [...all];
  const hits = all.filter(
    (line) => line.path.toLowerCase().includes(wanted) || line.value?.toLowerCase().includes(wanted),
  );
  const kept = new Set(hits.map((line) => line.path));
  for (const { path } of hits) {
    for (let dot = path.lastIndexOf("."); dot > 0; dot = path.lastIndexOf(".", dot - 1)) {
      kept.add(path.slice(0, dot));
    }
  }
  return all.filter((line) => kept.has(line.path));
}

/** How a difference is to be read: only here, only there, or other. */
export function direction(one: SpecDifference): "changed" | "only here" | "only there" {
  if (one.left === undefined || (one.left === null && one.right !== null)) return "only there";
  if (one.right === undefined || (one.right === null && one.left !== null)) return "only here";
  return "changed";
}
