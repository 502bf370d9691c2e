import { expect, test } from "vitest";
import { ago, bytes, duration, lasting, number, percent, roughly, short, shortened } from "./format";

test.each([
  [null, "–"], [0, "0s"], [0.0123, "12ms"], [2.345, "2.3s"], [59.6, "1m"], [90, "1m 30s"], [3600, "1h"], [90061, "1d 1h"],
])("%s seconds are %s", (seconds, text) => {
  expect(duration(seconds)).toBe(text);
});

test("a share just below 100% is not shown as 100%", () => {
  expect(percent(0.99999)).toBe("99.9%");
  expect(percent(1)).toBe("100.0%");
  expect(percent(null)).toBe("–");
});

test("a long path is cut in the middle", () => {
  expect(shortened("/data/a.txt", 11)).toBe("/data/a.txt");
  const long = shortened(`s3://lab/${"deep/".repeat(20)}part-*.parquet`, 24);
  expect(long).toBe("s3://la…p/part-*.parquet");
  expect(long).toHaveLength(24);
});

test("sizes, numbers and ages", () => {
  expect([bytes(512), bytes(1536), bytes(250 * 2 ** 30)]).toEqual(["512 B", "1.5 KiB", "250 GiB"]);
  expect([number(2.345678), number(0.00001234), number(0)]).toEqual(["2.346", "1.23e-5", "0"]);
  expect([short(9999), short(12_345), short(null)]).toEqual(["9,999", "12.3K", "–"]);
  expect([roughly(0.2), roughly(61), ago(100, 100.5), ago(0, 7300)]).toEqual(["now", "1m", "just now", "2h 1m ago"]);
});

test.each([
  [0, "0s"], [1.9, "1s"], [134.7, "2m 14s"], [3599.9, "59m 59s"], [3600, "1h"], [7325, "2h 2m"],
])("a time of %s seconds that goes on is %s: below an hour it has its seconds", (seconds, text) => {
  expect(lasting(seconds)).toBe(text);
  expect(ago(0, seconds)).toBe(seconds < 1 ? "just now" : `${text} ago`);
});
