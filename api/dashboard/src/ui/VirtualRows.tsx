/** A long list that renders only the rows in view. All rows have the same height. */

import { forwardRef, useEffect, useImperativeHandle, useLayoutEffect, useRef, useState, type ReactNode } from "react";

const EXTRA_ROWS = 12;

export interface VirtualRowsHandle {
  /** Scrolls a row into view. */
  show: (index: number) => void;
}

interface VirtualRowsProps {
  count: number;
  height_px: number;
  label: string;
  columns: number;
  head: ReactNode;
  row: (index: number) => ReactNode;
  /** Called with the first and last row in view. */
  onView?: (first: number, last: number) => void;
  /** A row that stays rendered outside the view, because it has the focus. */
  kept?: number | null;
}

export const VirtualRows = forwardRef<VirtualRowsHandle, VirtualRowsProps>(function VirtualRows(
  { count, height_px, label, columns, head, row, onView, kept = null }, handle,
) {
  const box = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, height: 800 });

  useLayoutEffect(() => {
    const element = box.current;
    if (!element) return;
    const measure = () => setView({ top: element.scrollTop, height: element.clientHeight });
    measure();
    const size = new ResizeObserver(measure);
    size.observe(element);
    element.addEventListener("scroll", measure, { passive: true });
    return () => {
      size.disconnect();
      element.removeEventListener("scroll", measure);
    };
  }, []);

  const firstSeen = Math.floor(view.top / height_px);
  const lastSeen = Math.min(count - 1, Math.ceil((view.top + view.height) / height_px));
  useEffect(() => onView?.(firstSeen, lastSeen), [onView, firstSeen, lastSeen]);

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

  const from = Math.max(0, firstSeen - EXTRA_ROWS);
  const to = Math.min(count - 1, lastSeen + EXTRA_ROWS);
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
