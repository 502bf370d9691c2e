import { expect, test } from "vitest";
import { TABS, tabName, tabOf, tabPath } from "./tabs";

test("each tab is found at its address, and nothing else is a tab", () => {
  for (const tab of TABS) {
    const part = tabPath("a1", tab, "").split("/")[3];
    expect(tabOf(part)).toBe(tab);
  }
  expect(tabOf("overview")).toBeNull();
  expect(tabOf("nonsense")).toBeNull();
  expect(tabOf("constructor")).toBeNull();
});

test("the interval stays selected from tab to tab, what belongs to one tab does not", () => {
  expect(tabPath("a1", "logs", "?from=10&to=20&incident=3&rank=1")).toBe("/jobs/a1/logs?from=10&to=20");
  expect(tabPath("a1", "incidents", "?from=10&to=20", { incident: "3" })).toBe("/jobs/a1/incidents?from=10&to=20&incident=3");
  expect(tabPath("a/1", "overview", "?grep=x")).toBe("/jobs/a%2F1");
});

test("a program has processes and an output", () => {
  expect(tabName("ranks", { brings: "script" })).toBe("Processes");
  expect(tabName("logs", { brings: "script" })).toBe("Output");
  expect(tabName("ranks", { brings: "recipe" })).toBe("Ranks");
});
