/** The size of a job's world over time, for the ribbon. Pure: periods and a width in, steps out. */

import type { MeshChangeView, TimelineView, WorldPeriodView } from "../api/types";
import { plural } from "../format";
import { timeScale, type Window } from "./axis";

/** A stretch of the ribbon. `height`: its share of the full height, above 0 and 1 at most. */
export interface WorldStep {
  x: number;
  width: number;
  height: number;
}

/** The height of time without a world: in the queue, paused, or before the first attempt. */
export const IDLE_HEIGHT = 0.16;

export function hasResizes(worlds: readonly WorldPeriodView[]): boolean {
  return new Set(worlds.map((world) => meshText(world.mesh))).size > 1;
}

/**
 * The steps of the ribbon from left to right, without gaps: as high as the number of ranks. A job
 * with one mesh has one step of the full height. Of steps that share a pixel one is left, so the
 * number of steps is bounded by the width.
 */
export function worldSteps(worlds: readonly WorldPeriodView[], window: Window, width: number): WorldStep[] {
  if (!hasResizes(worlds)) return [{ x: 0, width, height: 1 }];
  const scale = timeScale(window, width);
  const most = Math.max(...worlds.map((world) => world.world_size));
  const steps: WorldStep[] = [];
  let end = 0;
  for (const world of worlds) {
    const left = Math.min(width, Math.max(0, scale(world.since)));
    const right = Math.min(width, Math.max(0, scale(world.until)));
    if (right <= left) continue;
    append(steps, end, left, IDLE_HEIGHT);
    append(steps, Math.max(end, left), right, Math.max(IDLE_HEIGHT, world.world_size / most));
    end = Math.max(end, right);
  }
  append(steps, end, width, IDLE_HEIGHT);
  return steps;
}

/** Touching steps of the same height become one; a step of less than a pixel joins its neighbour. */
function append(steps: WorldStep[], from: number, to: number, height: number): void {
  const last = steps[steps.length - 1];
  if (last && (last.height === height || to - from < 1)) last.width = Math.max(last.width, to - last.x);
  else if (to > from) steps.push({ x: from, width: to - from, height });
}

/** The world at a time; null while the job had none. */
export function worldAt(worlds: readonly WorldPeriodView[], at: number): WorldPeriodView | null {
  return worlds.find((world) => at >= world.since && at < world.until) ?? null;
}

/** The present world; null while the job has none. */
export function presentWorld(timeline: TimelineView | undefined): WorldPeriodView | null {
  const newest = timeline?.worlds[timeline.worlds.length - 1];
  return newest && newest.until >= timeline!.until - 1e-3 ? newest : null;
}

export interface WorldTime {
  world: WorldPeriodView;
  seconds: number;
}

/** The time on each mesh within the window, the largest world first. The ends of a window are rounded,
 * so a mesh with less than a thousandth of it is left out. */
export function timeByWorld(worlds: readonly WorldPeriodView[], window: Window): WorldTime[] {
  const found = new Map<string, WorldTime>();
  for (const world of worlds) {
    const seconds = Math.min(world.until, window.until) - Math.max(world.since, window.since);
    if (seconds <= 0) continue;
    const key = meshText(world.mesh);
    const known = found.get(key);
    if (known) known.seconds += seconds;
    else found.set(key, { world, seconds });
  }
  const least = (window.until - window.since) / 1000;
  return [...found.values()].filter(({ seconds }) => seconds >= least).sort((a, b) => b.world.world_size - a.world.world_size);
}

/** "dp_shard 4 × tp 2". */
export function meshText(mesh: Record<string, number>): string {
  return Object.entries(mesh)
    .map(([axis, size]) => `${axis} ${size}`)
    .join(" × ");
}

/** "8 ranks on 4 nodes". */
export function sizeText(world: Pick<WorldPeriodView, "world_size" | "nodes">): string {
  return `${plural(world.world_size, "rank")} on ${plural(world.nodes, "node")}`;
}

/** "dp_shard 4 × tp 2 → dp_shard 3 × tp 2". */
export function changeText(change: MeshChangeView): string {
  return `${meshText(change.before)} → ${meshText(change.after)}`;
}

/** Whether the number of ranks grew, shrank or stayed. */
export function direction(change: MeshChangeView): "grew" | "shrank" | "changed" {
  if (change.ranks_after === change.ranks_before) return "changed";
  return change.ranks_after > change.ranks_before ? "grew" : "shrank";
}

export const ARROWS = { grew: "▲", shrank: "▼", changed: "↔" } as const;
