import { expect, test } from "vitest";

import type { MetricPage, MetricPoint } from "../api/types";
import { columns, merged, nearest, ofProgram, shown, thin } from "./series";

const point = (step: number, attempt = 1, loss: number | null = step): MetricPoint => ({
  step,
  attempt,
  at: 1000 + step + (attempt - 1) * 100,
  values: { loss, samples: `s${step}` },
});
const metrics = (items: MetricPoint[]): MetricPage => ({
  names: ["samples", "loss", "grad_norm"],
  items,
  discarded: [],
  last_step: items[items.length - 1]?.step ?? 0,
  next_cursor: null,
});

test("only series with numbers in them are shown", () => {
  expect(shown(metrics([point(1)]))).toEqual(["loss"]);
});

test("repeated steps replace the earlier steps, which become discarded", () => {
  const found = merged(metrics([point(1), point(2), point(3)]), [point(2, 2), point(3, 2)], 100);
  expect(found.items.map(({ step, attempt }) => [step, attempt])).toEqual([[1, 1], [2, 2], [3, 2]]);
  expect(found.discarded).toEqual([{ attempt: 1, points: [point(2), point(3)] }]);
});

test("a point that the stream repeats is kept once, and the former value is not modified", () => {
  const before = metrics([point(1)]);
  const found = merged(before, [point(1), point(2)], 100);
  expect(found.items.map(({ step }) => step)).toEqual([1, 2]);
  expect(before.items).toHaveLength(1);
});

test("history and discarded steps share one axis", () => {
  const history = { ...metrics([point(1), point(2, 2)]), discarded: [{ attempt: 1, points: [point(2), point(3)] }] };
  const found = columns(history, "loss", "step", null);
  expect(found.x).toEqual([1, 2, 3]);
  expect(found.history).toEqual([1, 2, undefined]);
  expect(found.discarded[0]?.values).toEqual([undefined, 2, 3]);
});

test("a value that was not measured breaks the line", () => {
  expect(columns(metrics([point(1), point(2, 1, null), point(3)]), "loss", "time", null).history).toEqual([1, null, 3]);
});

test("points outside the window are left out", () => {
  expect(columns(metrics([point(1), point(5), point(9)]), "loss", "time", { since: 1004, until: 1006 }).x).toEqual([1005]);
});

test("thinning keeps spikes and both ends", () => {
  const points = Array.from({ length: 10_000 }, (_, step) => point(step, 1, step === 4321 ? 99 : 1));
  const found = thin(points, ["loss"], 200);
  expect(found.length).toBeLessThanOrEqual(200);
  expect(found.some((kept) => kept.values["loss"] === 99)).toBe(true);
  expect([found[0]?.step, found[found.length - 1]?.step]).toEqual([0, 9999]);
});

test("the nearest point is found", () => {
  expect([nearest([1, 5, 9], 6), nearest([1, 5, 9], 8), nearest([], 3)]).toEqual([1, 2, -1]);
});

test("a program's lines continue over steps without a metric, and what is never measured is left out", () => {
  const points = [1, 2, 3].map((step) => ({ step, attempt: 1, at: 1000 + step, values: { loss: step === 2 ? null : step, lr: null, loader_wait_s: 0, tokens_per_second: null, step_time_s: 1 } }));
  const found = ofProgram({ items: points, names: ["loss", "lr", "loader_wait_s", "tokens_per_second", "step_time_s"], next_after_step: null, discarded: [] } as unknown as MetricPage);
  expect(shown(found)).toEqual(["loss", "time_between_reports_s"]);
  expect(columns(found, "loss", "step", null).history).toEqual([1, undefined, 3]);
});

test("a custom metric becomes a series from its first value, and its line continues over missing steps", () => {
  const own = (step: number, accuracy: number) => ({
    ...point(step),
    values: { ...point(step).values, accuracy },
  });
  const found = merged(metrics([point(1)]), [point(2), own(3, 0.5), point(4), own(5, 0.75)], 100);
  expect(shown(found)).toEqual(["loss", "accuracy"]);
  expect(columns(found, "accuracy", "step", null).history).toEqual([
    undefined, undefined, 0.5, undefined, 0.75,
  ]);
});

const evaluated = (step: number) => ({
  ...point(step),
  values: { ...point(step).values, grad_norm: 1, ...(step % 50 ? {} : { eval_loss: step, eval_accuracy: 0.5 }) },
});

test("live steps thin out a chart, and every result of an evaluation that it has room for stays", () => {
  const steps = Array.from({ length: 2000 }, (_, step) => evaluated(step));
  const found = merged(metrics(steps.slice(0, 1000)), steps.slice(1000), 600);
  expect(found.items.length).toBeLessThanOrEqual(600);
  expect(found.items.filter(({ values }) => "eval_loss" in values).length).toBe(40);
});

test("results of evaluations are drawn as points, and follow the loss", () => {
  const found = merged(metrics([point(1)]), [49, 50, 51, 99, 100].map(evaluated), 100);
  expect(columns(found, "eval_loss", "step", null).sparse).toBe(true);
  expect(columns(found, "loss", "step", null).sparse).toBe(false);
  expect(shown(found)).toEqual(["loss", "eval_loss", "grad_norm", "eval_accuracy"]);
});
