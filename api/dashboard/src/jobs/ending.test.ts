import { expect, test } from "vitest";
import type { JobRow } from "../api/types";
import { endingOf, isLow } from "./ending";

const row = (change: Partial<JobRow>): JobRow => ({
  id: "1", name: "job", owner: null, state: "SUCCEEDED", desired: "running", step: 10_000, steps: 10_000, attempt: 1, incidents: 0,
  loss: null, tokens_per_second: null, goodput: null, goodput_settled: false, eta_s: null, waiting: null, outcome_code: "succeeded",
  created_at: 0, started_at: 10, ended_at: 744, event_seq: 5, ...change,
});

test("the end of a job tells its outcome, when it ended, how long it took and what it survived", () => {
  expect(endingOf(row({ incidents: 2 }), 744 + 200)).toEqual({
    outcome: "all 10,000 steps", times: "took 12m 14s · ended 3m ago", incidents: "2 incidents",
  });
  expect(endingOf(row({ state: "CANCELLED", started_at: null }), 744)?.times).toBe("ended just now");
  expect(endingOf(row({ state: "RUNNING" }), 1000)).toBeNull();
});

test.each([
  [{ state: "FAILED", outcome_code: "out_of_failures", step: 812 }, "out of failures at step 812 of 10,000"],
  [{ state: "FAILED", outcome_code: "user_error", step: 0 }, "user error before its first step"],
  [{ state: "FAILED", outcome_code: null, step: 3, steps: null }, "failed at step 3"],
  [{ state: "CANCELLED", step: null, steps: null }, "cancelled"],
  [{ state: "CANCELLED", step: 0, started_at: null }, "cancelled before it started"],
  [{ step: null, steps: null }, "completed"],
  [{ step: 61, steps: null }, "completed at step 61"],
  [{ outcome_code: "stopped_early", step: 120 }, "stopped early at step 120 of 10,000"],
] as const)("the outcome of %j is %s", (change, outcome) => {
  expect(endingOf(row(change), 1000)?.outcome).toBe(outcome);
});

test("an ended job tells its incidents", () => {
  expect(endingOf(row({ state: "FAILED", incidents: 1 }), 1000)?.incidents).toBe("1 incident");
  expect(endingOf(row({ state: "CANCELLED", incidents: 1 }), 1000)?.incidents).toBe("1 incident");
  expect(endingOf(row({}), 1000)?.incidents).toBe("no incidents");
});

test("only a settled goodput is low", () => {
  expect(isLow(row({ goodput: 0.2 }))).toBe(false);
  expect(isLow(row({ goodput: 0.2, goodput_settled: true }))).toBe(true);
  expect(isLow(row({ goodput: 0.95, goodput_settled: true }))).toBe(false);
  expect(isLow(row({ goodput: null, goodput_settled: true }))).toBe(false);
});
