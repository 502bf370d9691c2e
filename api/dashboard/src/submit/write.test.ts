import { expect, test } from "vitest";
import { yaml } from "./write";

test("short sections are written in a line, long sections as blocks", () => {
  const text = yaml({
    name: "tiny",
    model: { dim: 128, heads: 4 },
    train: { steps: 300, optimizer: { name: "adamw", lr: 0.0003 } },
    empty: {},
    list: [1, "two"],
  });
  expect(text).toBe(
    "name: tiny\nmodel: {dim: 128, heads: 4}\ntrain:\n  steps: 300\n  optimizer: {name: adamw, lr: 0.0003}\nempty: {}\nlist: [1, two]\n",
  );
});

test.each([
  ["yes", '"yes"'],
  ["no: colon", '"no: colon"'],
  ["s3://bucket/a", '"s3://bucket/a"'],
  ["12", '"12"'],
  ["", '""'],
  ["/data/corpus", "/data/corpus"],
  [null, "null"],
  [true, "true"],
  [1e-8, "1.0e-8"],
  [1e20, "1.0e+20"],
  ["a\u0085b\u2028", '"a\\u0085b\\u2028"'],
])("%j is written as %s", (value, written) => {
  expect(yaml({ key: value })).toBe(`key: ${written}\n`);
});
