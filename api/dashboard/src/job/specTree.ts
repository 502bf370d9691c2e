/** A spec as lines with paths, for display and comparison. Pure. */

import type { SpecDifferenceView } from "../api/types";

export interface SpecLine {
  path: string;
  key: string;
  depth: number;
  /** Null for a section, whose keys follow. */
  value: string | null;
}

/** Sections in the order of the document, scalars before the sections beside them. */
export function lines(value: unknown, path = "", depth = 0): SpecLine[] {
  if (!isSection(value)) return [];
  const entries = Object.entries(value);
  const scalars = entries.filter(([, field]) => !isSection(field));
  const sections = entries.filter(([, field]) => isSection(field));
  return [...scalars, ...sections].flatMap(([key, field]) => {
    const here = path ? `${path}.${key}` : key;
    const section = isSection(field);
    const line: SpecLine = { path: here, key, depth, value: section ? null : toYaml(field) };
    return section ? [line, ...lines(field, here, depth + 1)] : [line];
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

/** A value as YAML in a single line. */
export function toYaml(value: unknown): string {
  if (value === undefined) return "";
  if (value === null) return "null";
  if (typeof value === "string") {
    return value === "" || /^[\s\d\-[{&*!|>'"%@`]|[:#]\s|^(true|false|null|yes|no)$|\s$/i.test(value)
      ? JSON.stringify(value)
      : value;
  }
  return JSON.stringify(value);
}

/** The whole spec as YAML. */
export function specYaml(spec: unknown): string {
  return lines(spec)
    .map((line) => `${"  ".repeat(line.depth)}${line.key}:${line.value === null ? "" : ` ${line.value}`}\n`)
    .join("");
}

/** The lines whose path or value contains the text, with the sections around them. */
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

/** Whether a field exists in both specs (with other values) or in one of them only. */
export function direction({ left, right }: SpecDifferenceView): "changed" | "only here" | "only there" {
  if (left === undefined || (left === null && right !== null)) return "only there";
  if (right === undefined || (right === null && left !== null)) return "only here";
  return "changed";
}
