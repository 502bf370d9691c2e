import { expect, test } from "vitest";

import { halves, unpacked } from "./packed";

const base64 = (...bits: number[]) =>
  btoa(String.fromCharCode(...bits.flatMap((half) => [half & 255, half >> 8])));

test("half-precision floats are decoded exactly", () => {
  const found = halves(base64(0x0000, 0x3c00, 0xc000, 0x3511, 0x7bff, 0x0001, 0x03ff, 0x7e00, 0x7c00));
  expect([...found]).toEqual(
    [0, 1, -2, 0.316650390625, 65504, 2 ** -24, 1023 * 2 ** -24, NaN, Infinity].map(Math.fround),
  );
});

test("each rank gets the name of its node and its own row", () => {
  const history = unpacked({
    of: "compute_s", since: 0, until: 2, bucket_s: 1, buckets: 2,
    ranks: [0, 1, 5], nodes: ["a", "b"], node_of: [1, 0, 1],
    values: base64(0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x7e00),
  });
  expect(history.ranks).toEqual([{ rank: 0, node: "b" }, { rank: 1, node: "a" }, { rank: 5, node: "b" }]);
  expect([...history.values]).toEqual([1, 2, 3, 4, 5, NaN]);
});
