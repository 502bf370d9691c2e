import { expect, test } from "vitest";

import { isTime, parsed, rfc3339, seconds, withSeconds } from "./times";

test("times become Unix seconds, to the microsecond; other texts stay", () => {
  const text = '{"at":"2026-01-31T12:00:00.250001Z","job":{"ended_at":null,"name":"2026-01-31T12:00:00.250001Z"},"runs":[{"since":"1970-01-01T00:00:01.000000Z"}],"text":"x"}';
  const wanted = {
    at: 1769860800.250001,
    job: { ended_at: null, name: "2026-01-31T12:00:00.250001Z" },
    runs: [{ since: 1 }],
    text: "x",
  };
  expect(parsed(text)).toEqual(wanted);
  expect(withSeconds(JSON.parse(text))).toEqual(wanted);
  expect(seconds("yesterday")).toBeNull();
  expect(rfc3339(1769860800.25)).toBe("2026-01-31T12:00:00.250Z");
});

test("a number too large for a time is none", () => {
  expect([1769860800, -1, 1e20, Number.NaN].map(isTime)).toEqual([true, true, false, false]);
});
