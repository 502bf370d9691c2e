/** Computes the rows of a long list to draw; rows have equal heights. Pure. */

export interface Visible {
  first: number;
  /** One past the last. */
  end: number;
  /** Height of all rows together. */
  total: number;
}

/** Pixels. Browsers limit the height of an element to some 16 million pixels. */
const MAX_HEIGHT = 8_000_000;

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
    total: Math.min(MAX_HEIGHT, count * rowHeight),
  };
}

/** Whether a list is scrolled to its end, within 1.5 rows; such a list follows new rows. */
export function atEnd(scrollTop: number, height: number, total: number, rowHeight: number): boolean {
  return scrollTop + height >= total - rowHeight * 1.5;
}
