/** The sizes that a user may order for an elastic job. Pure. */

export interface ResizeRange {
  min: number;
  max: number;
}

/** `resources.nodes` of a resolved spec; null for a job of one size. */
export function resizeRange(spec: Record<string, unknown>): ResizeRange | null {
  const resources = spec["resources"] as { nodes?: ResizeRange | null } | null | undefined;
  return resources?.nodes ?? null;
}

/** Why this text is no size that may be ordered; null if it is. */
export function sizeFault(text: string, { min, max }: ResizeRange): string | null {
  const nodes = Number(text);
  if (text.trim() !== "" && Number.isInteger(nodes) && nodes >= min && nodes <= max) return null;
  return `A whole number from ${min} to ${max} is needed.`;
}

/** "at most 3 nodes"; null: as many as the spec allows. */
export function orderText(nodes: number | null, { max }: ResizeRange): string {
  return nodes === null ? `as many as the spec allows (${max})` : `at most ${nodes}`;
}
