import { expect, test } from "vitest";
import { functionsIn, moduleOf, referencesOf, scriptsOf, usualFunction, usualScript } from "./entries";

test("the Python files at the top are offered, the usual ones first", () => {
  expect(scriptsOf(["a.py", "lib/b.py", "main.py", "read.md", "train.py"])).toEqual(["train.py", "main.py", "a.py"]);
  expect(scriptsOf(["src/go.py", "x.txt"])).toEqual(["src/go.py"]);
});

test("a script is proposed only if it is the usual one or the only one", () => {
  expect(usualScript(["train.py", "a.py"])).toBe("train.py");
  expect(usualScript(["fit.py"])).toBe("fit.py");
  expect(usualScript(["a.py", "b.py"])).toBeNull();
  expect(usualScript([])).toBeNull();
});

test("functions at the top level are found", () => {
  expect(functionsIn("def main(ctx):\n  def inner():\n    pass\nasync def later(): ...\ndef _own(): ...\nclass A:\n  def method(self): ...\ndef typed[T](x: T): ...\n")).toEqual(["main", "later", "typed"]);
});

test.each([["train.py", "train"], ["a/b.py", "a.b"], ["a/__init__.py", "a"], ["my-file.py", null], ["1.py", null]])("the module of %s is %s", (path, module) => {
  expect(moduleOf(path)).toBe(module);
});

test("a function is proposed only if its name is in one file alone", () => {
  const references = referencesOf(new Map([["spirals.py", ["main", "model"]], ["other.py", ["model"]], ["not-a-module.py", ["main"]]]));
  expect(references).toEqual(["spirals:main", "spirals:model", "other:model"]);
  expect(usualFunction(references, "train:main")).toBe("spirals:main");
  expect(usualFunction(references, "train:model")).toBeNull();
});
