/** Decodes the rank history of the API: half-precision floats in base64. Pure. */

import type { RankHeatView } from "../../api/types";
import type { RankHistory } from "../views";

export function unpacked({ since, until, bucket_s, buckets, ranks, nodes, node_of, values }: RankHeatView): RankHistory {
  return {
    since,
    until,
    bucket_s,
    buckets,
    ranks: ranks.map((rank, at) => ({ rank, node: nodes[node_of[at]!] ?? "" })),
    values: halves(values),
  };
}

/** Little-endian half-precision floats. */
export function halves(base64: string): Float32Array {
  const bytes = atob(base64);
  const found = new Float32Array(bytes.length >> 1);
  for (let at = 0; at < found.length; at++) {
    found[at] = half(bytes.charCodeAt(2 * at) | (bytes.charCodeAt(2 * at + 1) << 8));
  }
  return found;
}

/** A half-precision float from its sixteen bits: the sign, 5 of exponent, 10 of fraction. */
function half(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1024 + fraction) * POWERS[exponent]!;
}

/** Powers of two by exponent, for a fraction between 1024 and 2047. */
const POWERS = Float64Array.from({ length: 32 }, (_, exponent) => 2 ** (exponent - 25));
