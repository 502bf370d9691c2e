/** What the job page holds beside the types of the API. */

/** A quantity of each rank over time. */
export interface RankHistory {
  since: number;
  until: number;
  bucket_s: number;
  /** The number of buckets in a row. */
  buckets: number;
  ranks: readonly { rank: number; node: string }[];
  /** The rows in the order of `ranks`, one after another; NaN for a value that was not measured. */
  values: Float32Array;
}

/** Whether anything was measured of any rank. */
export const hasValues = ({ values, ranks, buckets }: RankHistory): boolean =>
  ranks.length > 0 && buckets > 0 && values.some((value) => !Number.isNaN(value));
