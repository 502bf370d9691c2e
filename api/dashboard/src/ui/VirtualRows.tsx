/** A long list of which only the rows in sight exist. All rows are of one height. */

import { forwardRef, useEffect, useImperativeHandle, useLayoutEffect, useRef, useState, type ReactNode } from "react";

const BEYOND = 12;

export interface VirtualRowsHandle {
  /** Bring a row into sight. */
  show: (index: number) => void;
}

interface VirtualRowsProps {
  count: number;
  height_px: number;
  label: string;
  columns: number;
  head: ReactNode;
  row: (index: number) => ReactNode;
  /** Called with the first and last row in sight. */
  onSight?: (first: number, last: number) => void;
  /** A row that stays there even out of sight, since it has the focus. */
  kept?: number | null;
}

export const VirtualRows = forwardRef<VirtualRowsHandle, VirtualRowsProps>(function VirtualRows(
  { count, height_px, label, columns, head, row, onSight, kept = null }, handle,
) {
  const box = useRef<HTMLDivElement>(null);
  const [sight, setSight] = useState({ top: 0, height: 800 });

  useLayoutEffect(() => {
    const element = box.current;
    if (!element) return;
    const look = () => setSight({ top: element.scrollTop, height: element.clientHeight });
    look();
    const size = new ResizeObserver(look);
    size.observe(element);
    element.addEventListener("scroll", look, { passive: true });
    return () => {
      size.disconnect();
      element.removeEventListener("scroll", look);
    };
  }, []);

  const firstSeen = Math.floor(sight.top / height_px);
  const lastSeen = Math.min(count - 1, Math.ceil((sight.top + sight.height) / height_px));
  useEffect(() => onSight?.(firstSeen, lastSeen), [onSight, firstSeen, lastSeen]);

  useImperativeHandle(handle, () => ({
    show(index) {
      const element = box.current;
      if (!element) return;
      const headHeight = element.querySelector<HTMLElement>("[data-head]")?.offsetHeight ?? 0;
      const top = index * height_px;
      const room = element.clientHeight - headHeight;
      if (top < element.scrollTop) element.scrollTop = top;
      else if (top + height_px > element.scrollTop + room) element.scrollTop = top + height_px - room;
    },
  }), [height_px]);

  const from = Math.max(0, firstSeen - BEYOND);
  const to = Math.min(count - 1, lastSeen + BEYOND);
  const shown: number[] = [];
  for (let index = from; index <= to; index += 1) shown.push(index);
  if (kept !== null && kept < count && (kept < from || kept > to)) shown.push(kept);

  return (
    <div className="rows" ref={box} role="table" aria-label={label} aria-rowcount={count + 1} aria-colcount={columns} tabIndex={0}>
      <div role="rowgroup" data-head className="rows-head">
        {head}
      </div>
      <div role="rowgroup" className="rows-body" style={{ height: `${count * height_px}px` }}>
        {shown.map((index) => (
          <div key={index} className="rows-place" role="presentation" style={{ transform: `translateY(${index * height_px}px)`, height: `${height_px}px` }}>
            {row(index)}
          </div>
        ))}
      </div>
    </div>
  );
});
