import { expect, test } from "vitest";

import type { TimelineView, WorldPeriodView } from "../api/types";
import { changeText, direction, hasResizes, IDLE_HEIGHT, meshText, presentWorld, sizeText, timeByWorld, worldAt, worldSteps } from "./worldLayout";

const world = (since: number, until: number, dp_shard: number): WorldPeriodView => ({
  since,
  until,
  mesh: { dp_shard, tp: 2 },
  world_size: dp_shard * 2,
  nodes: dp_shard,
});
const window = { since: 0, until: 100 };
const RESIZED = [world(10, 40, 4), world(40, 60, 3), world(70, 100, 4)];

test("a job with one mesh has one step of the full height, also with time off the cluster", () => {
  const whole = [{ x: 0, width: 200, height: 1 }];
  expect(worldSteps([], window, 200)).toEqual(whole);
  expect(worldSteps([world(10, 40, 4), world(60, 100, 4)], window, 200)).toEqual(whole);
  expect(hasResizes(RESIZED)).toBe(true);
});

test("a step is as high as its number of ranks, and time without a world is low", () => {
  expect(worldSteps(RESIZED, window, 200)).toEqual([
    { x: 0, width: 20, height: IDLE_HEIGHT },
    { x: 20, width: 60, height: 1 },
    { x: 80, width: 40, height: 0.75 },
    { x: 120, width: 20, height: IDLE_HEIGHT },
    { x: 140, width: 60, height: 1 },
  ]);
});

test("the steps have no gaps and their number is bounded by the width", () => {
  const many = Array.from({ length: 20_000 }, (_, index) => world(index / 200, (index + 1) / 200, 2 + (index % 5)));
  const steps = worldSteps(many, window, 300);
  expect(steps.length).toBeLessThanOrEqual(300);
  let end = 0;
  for (const step of steps) {
    expect(step.x).toBeCloseTo(end);
    expect(step.height).toBeGreaterThan(0);
    end = step.x + step.width;
  }
  expect(end).toBeCloseTo(300);
});

test("the world at a time", () => {
  expect(worldAt(RESIZED, 40)?.nodes).toBe(3);
  expect(worldAt(RESIZED, 65)).toBeNull();
  const timeline = (until: number): TimelineView => ({ since: 0, until, spans: [], worlds: RESIZED, incidents: [], checkpoints: [] });
  expect(presentWorld(timeline(100))?.nodes).toBe(4);
  expect(presentWorld(timeline(130))).toBeNull();
  expect(presentWorld(undefined)).toBeNull();
});

test("the time on each mesh covers only the window, the largest world first", () => {
  const found = timeByWorld(RESIZED, { since: 30, until: 80 });
  expect(found.map(({ world: { nodes }, seconds }) => [nodes, seconds])).toEqual([[4, 20], [3, 20]]);
});

test("a mesh, a size and a change of the mesh are short texts", () => {
  expect(meshText({ dp_shard: 4, tp: 2 })).toBe("dp_shard 4 × tp 2");
  expect(sizeText(world(0, 1, 1))).toBe("2 ranks on 1 node");
  const change = { before: { dp_shard: 4 }, after: { dp_shard: 3 }, ranks_before: 4, ranks_after: 3 };
  expect(changeText(change)).toBe("dp_shard 4 → dp_shard 3");
  expect(direction(change)).toBe("shrank");
  expect(direction({ ...change, ranks_after: 8 })).toBe("grew");
});
