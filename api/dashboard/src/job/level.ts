/** What a job brings to be run, and the level at which its program works with Holdfast. Pure. */

import type { JobView } from "../api/types";

type Spec = Record<string, unknown>;

/** Whether the ranks run a program of the user, which has its own model, data and loop. */
export const isProgram = (job: Pick<JobView, "brings">): boolean =>
  job.brings === "script" || job.brings === "command" || job.brings === "ray_train";

const LEVELS = ["Launched as it is", "Reports its steps", "Checkpoints in memory", "Holdfast's own step loop"];

/** `Level 1, reports its steps, through lightning`. */
export function levelName(level: number, integration?: string | null): string {
  const name = LEVELS[level];
  const parts = [`Level ${level}`, ...(name ? [name[0]!.toLowerCase() + name.slice(1)] : [])];
  return [...parts, ...(integration ? [`through ${integration.replaceAll("_", " ")}`] : [])].join(", ");
}

/** Sections of built-in models, and keys of what the job does not bring. */
const OF_BUILT_IN = new Set(["recipe", "model", "data", "train", "evaluate", "guards", "checks", "init_from"]);
const AXES_OF_PROGRAM = new Set(["dp_replicate", "dp_shard"]);

/** The part of a spec that means something for the job: without what it does not bring, and of a
 * program without the sections of built-in models. */
export function meaningful(spec: Spec, program: boolean): Spec {
  const brought = Object.entries(spec).filter(
    ([key, value]) => !(value === null && BROUGHT.has(key)) && !(key === "ray_run" && spec["ray_train"] == null),
  );
  if (!program) return Object.fromEntries(brought);
  const kept = brought.filter(([key]) => !OF_BUILT_IN.has(key));
  const parallel = Object.entries((spec["parallel"] ?? {}) as Spec);
  return { ...Object.fromEntries(kept), parallel: Object.fromEntries(parallel.filter(([axis]) => AXES_OF_PROGRAM.has(axis))) };
}

const BROUGHT = new Set(["function", "script", "command", "ray_train"]);

/** Whether a spec brings a program; a spec of an older job lacks the keys. */
export const bringsProgram = (spec: Spec): boolean =>
  ["script", "command", "ray_train"].some((key) => spec[key] !== null && spec[key] !== undefined);
