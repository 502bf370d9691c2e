import { expect, test } from "vitest";

import type { EventView, IncidentView, LogLineView } from "../api/types";
import { NodeIdShortener } from "./format";
import { costs, learnNodeIds, phaseBars, sentences } from "./incidents/incidentFacts";
import { appended, EMPTY_LOG, level, MAX_LINES, pieces, prepended, query, NO_FILTER } from "./logs/logBuffer";
import { lines, matching, toYaml, specYaml } from "./specTree";
import { joined } from "./incidents/useEvents";

const line = (number: number, text = "x"): LogLineView => ({
  line: number, at: number, rank: 0, attempt: 1, agent: "n0", worker: "n0.a.1", stream: "stderr", text,
});
const some = (first: number, count: number) => Array.from({ length: count }, (_, index) => line(first + index));

test("a log buffer stays within its limit, and reports the dropped lines", () => {
  let buffer = appended(EMPTY_LOG, some(1, MAX_LINES), MAX_LINES, false);
  buffer = appended(buffer, some(MAX_LINES + 1, 10), MAX_LINES + 10, false);
  expect([buffer.lines.length, buffer.lines[0]?.line, buffer.before]).toEqual([MAX_LINES, 11, 11]);
  const back = prepended(buffer, some(1, 10), null);
  expect([back.lines[0]?.line, back.before, back.moreAfter, back.seen]).toEqual([1, null, true, MAX_LINES]);
});

test("duplicate lines are held once", () => {
  const buffer = appended(appended(EMPTY_LOG, some(1, 3), 3, false), some(2, 3), 4, false);
  expect(buffer.lines.map((held) => held.line)).toEqual([1, 2, 3, 4]);
});

test("the query has only the active filters", () => {
  expect(query({ ...NO_FILTER, rank: 0, grep: "a b" }).toString()).toBe("rank=0&grep=a+b");
});

test("the level is guessed from the line if the server reports none", () => {
  expect(["ERROR no", "WARNING so", "ValueError: x", "INFO fine"].map((text) => level(line(1, text)))).toEqual([
    "error", "warning", "error", "info",
  ]);
});

test("matches are marked, and an invalid pattern marks nothing", () => {
  expect(pieces("loss 2.5 loss", "(?i)LOSS").map((piece) => piece.hit)).toEqual([true, false, true]);
  expect(pieces("abc", "(")).toEqual([{ text: "abc", hit: false }]);
});

const event = (seq: number): EventView => ({ seq, at: seq, kind: "x", text: "", until: null, data: {} });

test("events join at either end without duplicates", () => {
  const found = joined(joined([event(5), event(6)], [event(3), event(4)]), [event(6), event(7)]);
  expect(found.map((joinedEvent) => joinedEvent.seq)).toEqual([3, 4, 5, 6, 7]);
});

const incident = {
  phases_s: { form: 2, fence: 0.001, total: 2.1, odd: 0.099 },
  text: [{ about: "loss", text: "Ranks 2 and 3 were lost." }, { about: "end", text: "It is over." }],
  steps_lost: 1, cost: "90.0 device-seconds", restored_step: 41, closed_at: 5, opened_at: 1, signalled_at: 1,
} as unknown as IncidentView;

test("phases fill the bar in their order, and the shortest stays visible", () => {
  const found = phaseBars(incident.phases_s);
  expect(found.map((bar) => bar.name)).toEqual(["fence", "form", "odd"]);
  expect(found.reduce((sum, bar) => sum + bar.share, 0)).toBeCloseTo(1);
  expect(found[0]!.share).toBeGreaterThan(0.02);
});

test("the sentences of an incident are found by their subject, and its costs have values", () => {
  expect(sentences(incident, "loss")).toEqual(["Ranks 2 and 3 were lost."]);
  expect(costs(incident).map((cost) => cost.value)).toEqual(["2.1s", "1", "90.0 device-seconds", "41"]);
  const silent = { ...incident, level: 0, steps_lost: null, restored_step: null };
  expect(costs(silent).map((cost) => cost.label)).toEqual(["until the program ran again", "lost"]);
  expect(costs({ ...silent, cost: "" }).map((cost) => cost.label)).toEqual(["until the program ran again"]);
  expect(costs(incident)[0]!.label).toBe("until the first step of the next attempt");
  expect(costs({ ...silent, end_code: "user_error" })[0]!.label).toBe("until the job ended");
  for (const without of [{ closed_at: null }, { end_code: "user_error" }]) {
    const labels = costs({ ...incident, ...without }).map((cost) => cost.label);
    expect(labels.filter((label) => label.includes("step") && !label.startsWith("until"))).toEqual([]);
  }
});

test("a spec is read as lines, searched with its sections, and written as YAML", () => {
  const spec = { name: "a", train: { steps: 5, optimizer: { name: "adamw" } }, empty: {}, labels: null };
  expect(matching(lines(spec), "adam").map((found) => found.path)).toEqual(["train", "train.optimizer", "train.optimizer.name"]);
  expect(specYaml(spec)).toBe("name: a\nempty: {}\nlabels: null\ntrain:\n  steps: 5\n  optimizer:\n    name: adamw\n");
  expect([toYaml("yes"), toYaml("1"), toYaml("a: b")]).toEqual(['"yes"', '"1"', '"a: b"']);
});

test("node ids are cut to the shortest prefix that is unique among those shown", () => {
  const [id, alike, other] = ["ab12cd34".padEnd(56, "0"), "ab12cd34f".padEnd(56, "1"), "c".repeat(56)];
  const ids = new NodeIdShortener();
  expect(ids.shorten(`node ${id} is lost`)).toBe("node ab12cd34 is lost");
  learnNodeIds(ids, [{ ...incident, text: [{ about: "evidence", text: `node ${alike} and node ${other}` }] }]);
  expect(ids.parts(`node ${alike}`)).toEqual([{ text: "node " }, { text: "ab12cd34f", full: alike }]);
});
