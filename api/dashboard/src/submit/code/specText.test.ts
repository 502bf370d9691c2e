import { expect, test } from "vitest";
import { parse } from "yaml";
import { programOf, withCode, withEntry } from "./specText";

const CODE = `sha256:${"0a".repeat(32)}`;

test.each([
  ["name: a\nscript: train.py --lr 1\n", { key: "script", entry: "train.py", code: null }],
  ["script: '''my train.py'' --lr 1'\ncode: .\n", { key: "script", entry: "my train.py", code: "." }],
  ["script: -m  pkg.train --x\n", { key: "script", entry: "-m pkg.train", code: null }],
  ["script: [-m, pkg.train, --x]\n", { key: "script", entry: "-m pkg.train", code: null }],
  ["script: [train.py, --x]\n", { key: "script", entry: "train.py", code: null }],
  ["script:\n", { key: "script", entry: "", code: null }],
  ["script: null\nfunction: a.b:main\n", { key: "function", entry: "a.b:main", code: null }],
  ["command: bash start.sh\n", { key: "command", entry: "bash", code: null }],
  ['{"ray_train": "t:f", "code": "x"}', { key: "ray_train", entry: "t:f", code: "x" }],
  ["recipe: mine.own:Recipe\n", { key: "recipe", entry: "mine.own:Recipe", code: null }],
  ["recipe: pretrain\n", null],
  ["", null],
  ["# nothing\n", null],
  ["name: [unfinished", undefined],
  ["- a list\n", undefined],
])("%j starts %j", (text, program) => {
  expect(programOf(text)).toEqual(program);
});

test.each([
  ["# mine\nname: a   # own\nscript: train.py   # go\nparallel: {dp_shard: 2}\n", `# mine\nname: a   # own\nscript: train.py   # go\ncode: ${CODE}\nparallel: {dp_shard: 2}\n`],
  ["name: a\ncode: .   # here\nfunction: t:main\n", `name: a\ncode: ${CODE}   # here\nfunction: t:main\n`],
  ["code:\nscript: t.py", `code: ${CODE}\nscript: t.py`],
  ["script:\n  - t.py\n  - --x\nname: a\n", `script:\n  - t.py\n  - --x\ncode: ${CODE}\nname: a\n`],
  ["name: a\nscript: t.py", `name: a\nscript: t.py\ncode: ${CODE}\n`],
  ["script: |\n  t.py --x\nname: a\n", `script: |\n  t.py --x\ncode: ${CODE}\nname: a\n`],
  ["  name: a\n  script: t.py\n", `  name: a\n  script: t.py\n  code: ${CODE}\n`],
  ['{"name": "a",\n "script": ["t.py"]}', `{"name": "a",\n "script": ["t.py"], "code": "${CODE}"}`],
  ['{"code": "old", "script": "t.py"}', `{"code": "${CODE}", "script": "t.py"}`],
  ["", `code: ${CODE}\n`],
  ["# mine", `# mine\ncode: ${CODE}\n`],
])("the id of an upload is written into %j, and nothing else changes", (text, changed) => {
  expect(withCode(text, CODE)).toBe(changed);
});

test.each([
  ["script: train.py --lr 1   # go\n", "a/b.py", "script: a/b.py --lr 1   # go\n"],
  ["script: -m pkg.train --lr 1\n", "train.py", "script: train.py --lr 1\n"],
  ["script: train.py\n", "my file.py", "script: \"'my file.py'\"\n"],
  ["script:\n", "train.py", "script: train.py\n"],
  ["script: [-m, pkg.train, --x]\n", "train.py", 'script: ["train.py", --x]\n'],
  ["script:\n  - train.py\n  - --x\n", "go.py", 'script:\n  - "go.py"\n  - --x\n'],
  ['{"script": "train.py --x"}', "go.py", '{"script": "go.py --x"}'],
])("in %j another script is written, and its arguments stay", (text, entry, changed) => {
  expect(withEntry(text, "script", entry)).toBe(changed);
});

test("another function is written", () => {
  expect(parse(withEntry("name: a\nfunction: train:main # this\n", "function", "spirals:fit") ?? "")).toEqual({ name: "a", function: "spirals:fit" });
});

test("a text that cannot be read is not changed", () => {
  expect(withCode("name: [unfinished", CODE)).toBeNull();
  expect(withCode("- a list\n", CODE)).toBeNull();
  expect(withEntry("script: {", "script", "train.py")).toBeNull();
});
