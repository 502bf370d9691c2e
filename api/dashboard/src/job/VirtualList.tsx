/** A long list of rows of equal height; only the rows in view are in the document. */

import {
  forwardRef,
  useCallback,
  useImperativeHandle,
  useLayoutEffect,
  useRef,
  useState,
  type ReactElement,
} from "react";

import { atEnd, visible } from "./rows";

export interface ListHandle {
  toTop: () => void;
  toEnd: () => void;
  /** Keeps the visible rows in place after `rows` rows were added (negative: dropped) above. */
  shift: (rows: number) => void;
}

interface Props {
  count: number;
  rowHeight: number;
  height: number;
  /** The CSS width of the longest row; without it rows are as wide as the list. */
  width?: string;
  label: string;
  role?: "log" | "list";
  /** Renders a row, with a key that stays the same when the row's index changes. */
  row: (index: number) => ReactElement;
  /** Stay at the end when rows are added. */
  follow?: boolean;
  onNearTop?: () => void;
  onNearEnd?: () => void;
  /** Called when the list reaches or leaves its end. */
  onEnd?: (at: boolean) => void;
}

const NEAR = 600;

export const VirtualList = forwardRef<ListHandle, Props>(function VirtualList(
  { count, rowHeight, height, width, label, role = "list", row, follow = false, onNearTop, onNearEnd, onEnd },
  handle,
) {
  const box = useRef<HTMLDivElement | null>(null);
  const [top, setTop] = useState(0);
  const end = useRef<boolean | null>(null);
  const { first, end: last, total } = visible(count, rowHeight, top, height);

  const onScroll = useCallback(() => {
    const element = box.current;
    if (!element) return;
    setTop((old) =>
      Math.floor(old / rowHeight) === Math.floor(element.scrollTop / rowHeight) ? old : element.scrollTop,
    );
    const at = atEnd(element.scrollTop, element.clientHeight, element.scrollHeight, rowHeight);
    if (at !== end.current) {
      end.current = at;
      onEnd?.(at);
    }
    if (element.scrollTop < NEAR) onNearTop?.();
    if (element.scrollHeight - element.scrollTop - element.clientHeight < NEAR) onNearEnd?.();
  }, [rowHeight, onEnd, onNearTop, onNearEnd]);

  const scrollTo = useCallback(
    (to: number) => {
      if (!box.current) return;
      box.current.scrollTop = to;
      onScroll();
    },
    [onScroll],
  );
  useImperativeHandle(
    handle,
    () => ({
      toTop: () => scrollTo(0),
      toEnd: () => scrollTo(Number.MAX_SAFE_INTEGER),
      shift: (rows) => scrollTo((box.current?.scrollTop ?? 0) + rows * rowHeight),
    }),
    [scrollTo, rowHeight],
  );
  useLayoutEffect(() => {
    if (follow && box.current) scrollTo(box.current.scrollHeight);
  }, [follow, count, total, scrollTo]);

  // Absolutely placed: a scroll lays out and paints only the rows that appear.
  const rows: ReactElement[] = [];
  for (let index = first; index < last; index++) {
    const element = row(index);
    rows.push(
      <div key={element.key} className="virtual-row" style={{ top: index * rowHeight, height: rowHeight }}>
        {element}
      </div>,
    );
  }
  return (
    <div
      className="virtual"
      ref={box}
      style={{ height }}
      role={role === "log" ? "log" : "region"}
      aria-live="off"
      aria-label={label}
      tabIndex={0}
      onScroll={onScroll}
    >
      <div className="virtual-all" style={{ height: total, minWidth: width }}>
        {rows}
      </div>
    </div>
  );
});
