import { expect, test } from "vitest";

import { bringsProgram, isProgram, levelName, meaningful } from "./level";

test("a level is named with the plug-in that reached it", () => {
  expect(levelName(0)).toBe("Level 0, launched as it is");
  expect(levelName(1, "lightning")).toBe("Level 1, reports its steps, through lightning");
  expect(levelName(9, null)).toBe("Level 9");
});

test("scripts, commands and Ray Train functions are programs", () => {
  expect((["script", "command", "ray_train", "function", "recipe"] as const).map((brings) => isProgram({ brings }))).toEqual([true, true, true, false, false]);
});

test("a program's spec is shown without the sections of built-in models", () => {
  const spec = { name: "a", recipe: "pretrain", script: "a.py", function: null, model: { dim: 1 }, train: {}, parallel: { dp_shard: 2, tp: 1 }, program: { fork: true } };
  expect(meaningful(spec, true)).toEqual({ name: "a", script: "a.py", parallel: { dp_shard: 2 }, program: { fork: true } });
  expect(meaningful({ ...spec, script: null, ray_train: null, ray_run: { num_to_keep: 2 } }, false)).toEqual({ name: "a", recipe: "pretrain", model: { dim: 1 }, train: {}, parallel: { dp_shard: 2, tp: 1 }, program: { fork: true } });
  expect([bringsProgram(spec), bringsProgram({ name: "a", script: null }), bringsProgram({})]).toEqual([true, false, false]);
});
