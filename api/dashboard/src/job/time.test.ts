import { expect, test } from "vitest";

import type { SpanView } from "../api/types";
import { clipped, ticks, timeScale } from "./axis";
import { compact, deviceTime, fineDuration, finePercent, ranges } from "./format";
import { attemptBands, bars, marks, secondsByKind, spanAt } from "./ribbonLayout";

const span = (kind: SpanView["kind"], since: number, until: number, attempt = 1): SpanView => ({
  kind,
  since,
  until,
  attempt,
  incident: null,
});

test("durations have at most two units", () => {
  expect([0, 0.00004, 0.0417, 0.35, 4.2, 59.7, 3725].map(fineDuration)).toEqual([
    "0s", "40µs", "41.7ms", "350ms", "4.2s", "1m", "1h 2m",
  ]);
  expect(fineDuration(null)).toBe("–");
});

test("numbers are short, and an unknown number is not shown as zero", () => {
  expect([0, 0.000031, 2.3456, 12_400, 4_194_304, null].map((value) => compact(value))).toEqual([
    "0", "3.1e−5", "2.35", "12.4k", "4.19M", "–",
  ]);
  expect(finePercent(0.9999)).toBe("99.9%");
  expect(finePercent(0.00001)).toBe("<0.1%");
});

test("ranks are written as ranges", () => {
  expect(ranges([7, 1, 0, 2, 3])).toBe("0–3, 7");
  expect(ranges([0, 2, 4, 6, 8], 2)).toBe("0, 2 and 3 more");
});

test("ticks are round, inside the window and few", () => {
  const window = { since: 1_000_003, until: 1_003_603 };
  const found = ticks(window, 1100);
  expect(found.length).toBeGreaterThan(4);
  expect(found.length).toBeLessThanOrEqual(10);
  expect(found.every(({ at }) => at % 300 === 0 && at >= window.since && at <= window.until)).toBe(true);
});

test("a brush is ordered and clipped to the run", () => {
  const whole = { since: 100, until: 200 };
  expect(clipped({ since: 250, until: 150 }, whole)).toEqual({ since: 150, until: 200 });
  expect(clipped({ since: 210, until: 250 }, whole)).toBeNull();
});

test("the scale and its inverse agree", () => {
  const scale = timeScale({ since: 50, until: 150 }, 400);
  expect(scale.invert(scale(88))).toBeCloseTo(88);
});

test("a short loss among hours is visible, on top of the productive time", () => {
  const found = bars([span("productive", 0, 5000), span("recovering", 5000, 5000.2), span("productive", 5000.2, 10000, 2)], { since: 0, until: 10000 }, 800);
  const loss = found[found.length - 1]!;
  expect(loss.span.kind).toBe("recovering");
  expect(loss.width).toBe(2);
});

test("the number of bars is bounded by the width", () => {
  const spans = Array.from({ length: 20_000 }, (_, index) =>
    span(index % 2 ? "productive" : "detecting", index, index + 1, 1 + Math.floor(index / 2000)),
  );
  expect(bars(spans, { since: 0, until: 20_000 }, 500).length).toBeLessThan(600);
});

test("the loss of the greatest weight is shown at a pixel", () => {
  const found = bars([span("replaying", 10, 10.1), span("detecting", 10.1, 10.2)], { since: 0, until: 1000 }, 500);
  expect(found.map((bar) => bar.span.kind)).toEqual(["detecting"]);
});

test("marks that would overlap become one", () => {
  const found = marks([{ at: 1 }, { at: 2 }, { at: 90 }], { since: 0, until: 100 }, 100, 5);
  expect(found.map((mark) => mark.items.length)).toEqual([2, 1]);
});

test("seconds by kind and attempts cover only the window", () => {
  const spans = [span("productive", 0, 60), span("replaying", 60, 80, 2)];
  const window = { since: 30, until: 70 };
  expect(Object.fromEntries(secondsByKind(spans, window))).toEqual({ productive: 30, replaying: 10 });
  expect(attemptBands(spans, window, 40)).toEqual([
    { attempt: 1, x: 0, width: 30 },
    { attempt: 2, x: 30, width: 10 },
  ]);
  expect(spanAt({ since: 0, until: 80, spans, worlds: [], incidents: [], checkpoints: [] }, 65)?.kind).toBe("replaying");
});

test.each([
  [null, "–", "device-hours"], [0, "0", "device-seconds"], [0.0012, "4.3", "device-seconds"], [0.9, "3,240", "device-seconds"], [1, "1", "device-hours"], [12_345, "12.3k", "device-hours"],
])("%s device-hours are %s %s", (hours, value, unit) => {
  expect(deviceTime(hours)).toEqual({ value, unit });
});
