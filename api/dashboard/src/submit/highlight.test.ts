import { expect, test } from "vitest";
import { tokens } from "./highlight";

test("the tokens of a line join to the line", () => {
  for (const line of ["train: {steps: 300, lr: 3.0e-4}  # note", '  "a": "s3://b#c"', "- x: true", "", "plain # no"]) {
    expect(tokens(line).map((token) => token.text).join("")).toBe(line);
  }
});

test("keys, numbers and comments are distinguished", () => {
  const kinds = tokens("steps: 300  # so many").filter((token) => token.kind).map((token) => [token.text, token.kind]);
  expect(kinds).toEqual([["steps", "key"], [":", "mark"], ["300", "number"], ["# so many", "comment"]]);
});
