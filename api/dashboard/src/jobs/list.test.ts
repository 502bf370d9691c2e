import { expect, test } from "vitest";
import type { JobRow } from "../api/types";
import { filtersOf } from "./filters";
import { changed, first, without, withPage, type JobList } from "./list";

const row = (id: string, change: Partial<JobRow> = {}): JobRow => ({
  id, name: `job-${id}`, owner: null, state: "RUNNING", desired: "running", step: 10, steps: 100, attempt: 1, incidents: 0,
  loss: null, tokens_per_second: null, goodput: null, goodput_settled: false, eta_s: null, waiting: null, outcome_code: null,
  created_at: Number(id), started_at: null, ended_at: null, event_seq: 5, ...change,
});
const list: JobList = first({ items: [row("2"), row("1")], next_cursor: "c", total: 3, counts: { RUNNING: 3 } });
const all = filtersOf(new URLSearchParams());

test("a row is changed in place, and the counts follow", () => {
  const after = changed(list, row("1", { state: "RECOVERING", event_seq: 6 }), all);
  expect(after.rows.map(({ id, state }) => [id, state])).toEqual([["2", "RUNNING"], ["1", "RECOVERING"]]);
  expect(after.counts).toEqual({ RUNNING: 2, RECOVERING: 1 });
});

test("an older row than the shown row changes nothing", () => {
  expect(changed(list, row("1", { step: 9 }), all)).toBe(list);
  expect(changed(list, row("1", { event_seq: 4, step: 99 }), all)).toBe(list);
});

test("a new job comes first if it matches the filters", () => {
  expect(changed(list, row("9"), all).rows.map(({ id }) => id)).toEqual(["9", "2", "1"]);
  expect(changed(list, row("9"), filtersOf(new URLSearchParams("state=FAILED")))).toBe(list);
  expect(changed(list, row("9"), filtersOf(new URLSearchParams("sort=name")))).toBe(list);
  expect(changed(list, row("0"), all)).toBe(list); // older: it belongs to a page that is not loaded yet
});

test("a removed job leaves the list", () => {
  expect(without(list, "2").rows.map(({ id }) => id)).toEqual(["1"]);
  expect(without(list, "7")).toBe(list);
});

test("a page does not repeat rows that the stream added meanwhile", () => {
  const page = { items: [row("1"), row("0")], next_cursor: null, total: 3, counts: {} };
  expect(withPage(list, page).rows.map(({ id }) => id)).toEqual(["2", "1", "0"]);
});

test("filters are read from the URL, and invalid values are ignored", () => {
  const filters = filtersOf(new URLSearchParams("q=Job-1&state=running&state=NOPE&sort=age"));
  expect(filters).toEqual({ q: "Job-1", states: ["RUNNING"], owner: null, sort: "created" });
});
