import { expect, test } from "vitest";
import { pieces } from "./highlight";

test("the pieces of a line join to the line", () => {
  for (const line of ["train: {steps: 300, lr: 3.0e-4}  # note", '  "a": "s3://b#c"', "- x: true", "", "plain # no"]) {
    expect(pieces(line).map((piece) => piece.text).join("")).toBe(line);
  }
});

test("keys, numbers and comments are distinguished", () => {
  const kinds = pieces("steps: 300  # so many").filter((piece) => piece.kind).map((piece) => [piece.text, piece.kind]);
  expect(kinds).toEqual([["steps", "key"], [":", "mark"], ["300", "number"], ["# so many", "comment"]]);
});
