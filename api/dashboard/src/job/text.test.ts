import { expect, test } from "vitest";

import { eventWords } from "./eventWords";
import { costs, lostThings, phaseBars, tiers } from "./incidentFacts";
import { appended, EMPTY, HELD, level, pieces, prepended, query, NO_FILTER } from "./logBuffer";
import { atEnd, visible } from "./rows";
import { lines, matching, written, yaml } from "./specTree";
import { joined } from "./useEvents";
import type { Incident, JobEvent, LogLine } from "./views";

const line = (number: number, text = "x"): LogLine => ({
  line: number, at: number, rank: 0, attempt: 1, agent: "n0", worker: "n0.a.1", stream: "stderr", text,
});
const some = (first: number, count: number) => Array.from({ length: count }, (_, at) => line(first + at));

test("a log never holds more than it may, and says what it let go", () => {
  let buffer = appended(EMPTY, some(1, HELD), HELD, false);
  buffer = appended(buffer, some(HELD + 1, 10), HELD + 10, false);
  expect([buffer.lines.length, buffer.lines[0]?.line, buffer.before]).toEqual([HELD, 11, 11]);
  const back = prepended(buffer, some(1, 10), null);
  expect([back.lines[0]?.line, back.before, back.moreAfter, back.seen]).toEqual([1, null, true, HELD]);
});

test("lines that come twice are held once", () => {
  const buffer = appended(appended(EMPTY, some(1, 3), 3, false), some(2, 3), 4, false);
  expect(buffer.lines.map((one) => one.line)).toEqual([1, 2, 3, 4]);
});

test("the query has only what filters", () => {
  expect(query({ ...NO_FILTER, rank: 0, grep: "a b" }).toString()).toBe("rank=0&grep=a+b");
});

test("levels are read from the line where the server tells none", () => {
  expect(["ERROR no", "WARNING so", "ValueError: x", "INFO fine"].map((one) => level(line(1, one)))).toEqual([
    "error", "warning", "error", "info",
  ]);
});

test("matches are marked, and a pattern that cannot be read marks nothing", () => {
  expect(pieces("loss 2.5 loss", "(?i)LOSS").map((one) => one.hit)).toEqual([true, false, true]);
  expect(pieces("abc", "(")).toEqual([{ text: "abc", hit: false }]);
});

test("only rows in view, and a few beyond, are drawn", () => {
  expect(visible(1_000_000, 20, 400_000, 400)).toMatchObject({ first: 19_988, end: 20_032 });
  expect(visible(3, 20, 0, 400)).toMatchObject({ first: 0, end: 3, total: 60 });
  expect([atEnd(580, 400, 1000, 20), atEnd(100, 400, 1000, 20)]).toEqual([true, false]);
});

const event = (seq: number): JobEvent => ({ seq, at: seq, kind: "x", data: {} });

test("events join at either end, each once", () => {
  const found = joined(joined([event(5), event(6)], [event(3), event(4)]), [event(6), event(7)]);
  expect(found.map((one) => one.seq)).toEqual([3, 4, 5, 6, 7]);
});

test("events are told in words; of unknown kinds, their fields", () => {
  expect(eventWords({ ...event(1), kind: "checkpoint.saved", data: { step: 40, tier: "remote", nbytes: 2048 } })).toBe(
    "step 40 is in the remote tier, 2 KiB",
  );
  expect(eventWords({ ...event(1), kind: "new.thing", data: { rank: 3, took_s: 0.25, deep: {} } })).toBe("rank 3 · took s 250ms");
});

const incident = {
  phases_s: { form: 2, fence: 0.001, total: 2.1, odd: 0.099 },
  tiers: { "0": "own_ram", "1": "own_ram", "2": "partner_ram" },
  lost: [{ cause: "node_lost", ranks: [2, 3], agent: "n1", on_notice: false }],
  steps_lost: 1, device_seconds_lost: 90, restored_step: 41, closed_at: 5, opened_at: 1, signalled_at: 1,
} as unknown as Incident;

test("phases fill the bar in their order, the shortest is still to be seen", () => {
  const found = phaseBars(incident.phases_s);
  expect(found.map((one) => one.name)).toEqual(["fence", "form", "odd"]);
  expect(found.reduce((sum, one) => sum + one.share, 0)).toBeCloseTo(1);
  expect(found[0]!.share).toBeGreaterThan(0.02);
});

test("what was lost, and where the state came from", () => {
  expect(lostThings(incident)).toEqual(["node lost: ranks 2–3, agent n1"]);
  expect(tiers(incident)[0]).toEqual({ tier: "own memory", ranks: [0, 1] });
  expect(costs(incident).map((one) => one.value)).toEqual(["2.1s", "1", "1m", "41"]);
});

test("a spec is read as lines, searched with its sections, and written as YAML", () => {
  const spec = { name: "a", train: { steps: 5, optimizer: { name: "adamw" } }, empty: {}, labels: null };
  expect(matching(lines(spec), "adam").map((one) => one.path)).toEqual(["train", "train.optimizer", "train.optimizer.name"]);
  expect(yaml(spec)).toBe("name: a\nempty: {}\nlabels: null\ntrain:\n  steps: 5\n  optimizer:\n    name: adamw\n");
  expect([written("yes"), written("1"), written("a: b")]).toEqual(['"yes"', '"1"', '"a: b"']);
});
