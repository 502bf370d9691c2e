import { expect, test } from "vitest";
import { choices, MAX_BYTES, MAX_FILES, obstacle, proposal, remark, type Bundle } from "./bundle";
import type { Program } from "./specText";

const SCRIPT: Program = { key: "script", entry: "train.py", code: "." };
const FUNCTION: Program = { key: "function", entry: "train:main", code: "." };

const bundle = (paths: string[], more: Partial<Bundle> = {}): Bundle => ({
  name: "folder", isFolder: true, leftOut: [], unreadable: [], functions: new Map(), files: paths.map((path) => ({ path, bytes: 10 })), ...more,
});

test.each<[string, Bundle, Program, string | null]>([
  ["nothing", bundle([]), SCRIPT, "folder is empty"],
  ["empty files", bundle([], { files: [{ path: "train.py", bytes: 0 }] }), SCRIPT, "folder is empty"],
  ["ignored files", bundle([], { leftOut: [{ path: ".git/", by: null }] }), SCRIPT, "nothing but ignored files: change"],
  ["an ignored file", bundle([], { isFolder: false, name: "a.pyc", leftOut: [{ path: "a.pyc", by: null }] }), SCRIPT, "a.pyc is never sent: choose"],
  ["ignored files, chosen together", bundle([], { isFolder: false, name: "2 files", leftOut: [{ path: "a.py", by: ".gitignore" }] }), SCRIPT, "2 files contains nothing but ignored files: change"],
  ["unreadable files", bundle([], { unreadable: ["a.py"] }), SCRIPT, "Nothing in folder can be read"],
  ["too many", bundle(Array.from({ length: MAX_FILES + 1 }, (_, n) => `${n}.py`)), SCRIPT, "10,001 files, and 10,000 can be sent: leave out"],
  ["too large", bundle([], { files: [{ path: "train.py", bytes: 1 }, { path: "corpus.bin", bytes: MAX_BYTES }] }), SCRIPT, "the largest are corpus.bin (640 MiB), train.py (1 B)"],
  ["no Python", bundle(["read.md"]), SCRIPT, "has no Python file (.py)"],
  ["another file", bundle(["a.bin"], { isFolder: false, name: "a.bin" }), FUNCTION, "a.bin is not a Python file (.py): choose"],
  ["another script", bundle(["a.py", "b.py"]), SCRIPT, "train.py is not among the chosen files: choose"],
  ["binary text", bundle(["train.py"], { functions: new Map([["train.py", null]]) }), SCRIPT, "train.py is not a text file"],
  ["a script", bundle(["train.py"]), SCRIPT, null],
  ["a module", bundle(["a.txt"]), { ...SCRIPT, entry: "-m installed.module" }, null],
  ["files of a command", bundle(["start.sh"]), { ...SCRIPT, key: "command", entry: "bash" }, null],
])("%s: the obstacle", (_, files, program, message) => {
  if (message === null) expect(obstacle(files, program)).toBeNull();
  else expect(obstacle(files, program)).toContain(message);
});

test("a script is proposed where the spec's is not among the files", () => {
  expect(proposal(bundle(["fit.py"]), SCRIPT)).toBe("fit.py");
  expect(proposal(bundle(["main.py", "a.py"]), SCRIPT)).toBe("main.py");
  expect(proposal(bundle(["a.py", "b.py"]), SCRIPT)).toBeNull();
  expect(proposal(bundle(["train.py", "lib/fit.py"]), { ...SCRIPT, entry: "lib/fit.py" })).toBeNull();
  expect(proposal(bundle(["train.py"]), { ...SCRIPT, entry: "-m lib.fit" })).toBeNull();
});

test("the functions of the files are offered, and one that is not among them is remarked on", () => {
  const files = bundle(["spirals.py", "b.py"], { functions: new Map([["spirals.py", ["main"]], ["b.py", null]]) });
  expect(choices(files, FUNCTION)).toEqual(["spirals:main"]);
  expect(proposal(files, FUNCTION)).toBe("spirals:main");
  expect(remark(files, FUNCTION, false)).toContain("No function train:main was found");
  expect(remark(files, { ...FUNCTION, entry: "spirals:main" }, false)).toBeNull();
});

test("requirements are pointed out to a spec that names no packages", () => {
  const files = bundle(["requirements.txt", "train.py"]);
  expect(remark(files, SCRIPT, false)).toContain("runtime_env");
  expect(remark(files, SCRIPT, true)).toBeNull();
});
