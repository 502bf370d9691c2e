import { expect, test } from "vitest";
import { pieces } from "./highlight";

test("the pieces of a line are the line", () => {
  for (const line of ["train: {steps: 300, lr: 3.0e-4}  # note", '  "a": "s3://b#c"', "- x: true", "", "plain # no"]) {
    expect(pieces(line).map((one) => one.text).join("")).toBe(line);
  }
});

test("keys, numbers and comments are told apart", () => {
  const kinds = pieces("steps: 300  # so many").filter((one) => one.kind).map((one) => [one.text, one.kind]);
  expect(kinds).toEqual([["steps", "key"], [":", "mark"], ["300", "number"], ["# so many", "comment"]]);
});
