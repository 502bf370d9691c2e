import { expect, test } from "vitest";

import { orderText, resizeRange, sizeFault } from "./resizing";

test("only a spec with a range of nodes can be resized", () => {
  expect(resizeRange({ resources: { nodes: { min: 2, max: 4, axis: "dp_shard" } } })).toMatchObject({ min: 2, max: 4 });
  for (const spec of [{}, { resources: null }, { resources: { nodes: null } }, { resources: {} }]) {
    expect(resizeRange(spec)).toBeNull();
  }
});

test("a size is a whole number within the range", () => {
  const range = { min: 2, max: 4 };
  expect(["2", "3", "4"].map((text) => sizeFault(text, range))).toEqual([null, null, null]);
  for (const text of ["", " ", "1", "5", "2.5", "x"]) expect(sizeFault(text, range)).toContain("from 2 to 4");
});

test("an order reads as a clause", () => {
  expect([orderText(3, { min: 2, max: 8 }), orderText(null, { min: 2, max: 8 })]).toEqual(["at most 3", "as many as the spec allows (8)"]);
});
