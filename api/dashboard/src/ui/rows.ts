/** The rows of a long list that are in view, and a few beyond; all rows have the same height. */

import { defaultRangeExtractor, useVirtualizer } from "@tanstack/react-virtual";
import { useLayoutEffect, useRef } from "react";

const EXTRA_ROWS = 12;

export interface RowsOptions {
  count: number;
  height_px: number;
  /** A row that stays rendered outside the view. */
  kept?: number | null;
  /** A key that stays the same when the row's index changes; memoized. */
  keyOf?: (index: number) => number;
  /** Whether to stay at the end when rows are added there. If given, the rows in view also stay in place
   * when others are added or dropped above. */
  follow?: boolean | undefined;
}

export function useRows({ count, height_px, kept = null, keyOf = same, follow }: RowsOptions) {
  const box = useRef<HTMLDivElement>(null);
  const rows = useVirtualizer<HTMLDivElement, HTMLDivElement>({
    count,
    overscan: EXTRA_ROWS,
    getScrollElement: () => box.current,
    estimateSize: () => height_px,
    getItemKey: keyOf,
    anchorTo: follow === undefined ? "start" : "end",
    followOnAppend: follow === true,
    scrollEndThreshold: height_px * 1.5,
    rangeExtractor: (range) => {
      const shown = defaultRangeExtractor(range);
      return kept === null || kept >= count || shown.includes(kept) ? shown : [...shown, kept];
    },
  });
  useLayoutEffect(() => rows.measure(), [rows, height_px]);
  return { box, rows };
}

const same = (index: number): number => index;
