/** Which rows of a long list of rows of equal height are to be drawn. Pure. */

export interface Visible {
  first: number;
  /** One past the last. */
  end: number;
  /** Height of all rows together. */
  total: number;
}

/** Browsers lay out no element taller than some 16 million pixels. */
const TALLEST = 8_000_000;

export function visible(
  count: number,
  rowHeight: number,
  scrollTop: number,
  height: number,
  beyond = 12,
): Visible {
  const first = Math.floor(Math.max(0, scrollTop) / rowHeight) - beyond;
  const end = Math.ceil((Math.max(0, scrollTop) + height) / rowHeight) + beyond;
  return {
    first: Math.max(0, Math.min(first, count)),
    end: Math.max(0, Math.min(end, count)),
    total: Math.min(TALLEST, count * rowHeight),
  };
}

/** Whether the reader is at the end of a list, give or take a row: then it follows. */
export function atEnd(scrollTop: number, height: number, total: number, rowHeight: number): boolean {
  return scrollTop + height >= total - rowHeight * 1.5;
}
