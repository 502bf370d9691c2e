/** A long table that renders only the rows in view. */

import { useEffect, type ReactNode } from "react";
import { useRows } from "./rows";

interface VirtualRowsProps {
  count: number;
  height_px: number;
  label: string;
  columns: number;
  head: ReactNode;
  row: (index: number) => ReactNode;
  /** Called with the last row in view. */
  onView: (last: number) => void;
  /** A row that stays rendered outside the view, because it has the focus. */
  kept: number | null;
}

export function VirtualRows({ count, height_px, label, columns, head, row, onView, kept }: VirtualRowsProps) {
  const { box, rows } = useRows({ count, height_px, kept });
  const last = rows.range?.endIndex ?? 0;
  useEffect(() => onView(last), [onView, last]);
  return (
    <div className="rows" ref={box} role="table" aria-label={label} aria-rowcount={count + 1} aria-colcount={columns} tabIndex={0}>
      <div role="rowgroup" className="rows-head">
        {head}
      </div>
      <div role="rowgroup" className="rows-body" style={{ height: rows.getTotalSize() }}>
        {rows.getVirtualItems().map(({ key, index, start, size }) => (
          <div key={key} className="rows-place" role="presentation" style={{ transform: `translateY(${start}px)`, height: size }}>
            {row(index)}
          </div>
        ))}
      </div>
    </div>
  );
}
