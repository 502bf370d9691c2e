/** A long list that renders only the rows in view, may grow at both ends, and may follow its end. */

import { useImperativeHandle, useRef, type ReactNode, type Ref } from "react";
import { useRows, type RowsOptions } from "./rows";

export interface ListHandle {
  toTop: () => void;
  toEnd: () => void;
}

interface VirtualListProps extends Pick<RowsOptions, "count" | "follow"> {
  ref?: Ref<ListHandle>;
  keyOf: (index: number) => number;
  rowHeight: number;
  height: number;
  /** The CSS width of the longest row; without it rows are as wide as the list. */
  width?: string;
  label: string;
  role?: "log" | "region";
  row: (index: number) => ReactNode;
  onNearTop?: () => void;
  onNearEnd?: () => void;
  /** Called when the list reaches or leaves its end. */
  onEnd?: (at: boolean) => void;
}

const NEAR_PX = 600;

export function VirtualList(props: VirtualListProps) {
  const { ref, count, follow, keyOf, rowHeight, height, width, label, role = "region", row, onNearTop, onNearEnd, onEnd } = props;
  const { box, rows } = useRows({ count, height_px: rowHeight, keyOf, follow });
  const atEnd = useRef<boolean | null>(null);
  useImperativeHandle(ref, () => ({ toTop: () => rows.scrollToOffset(0), toEnd: () => rows.scrollToEnd() }), [rows]);
  const onScroll = ({ currentTarget: { scrollTop, scrollHeight, clientHeight } }: React.UIEvent) => {
    const below = scrollHeight - scrollTop - clientHeight;
    const at = below <= rowHeight * 1.5;
    if (at !== atEnd.current) onEnd?.((atEnd.current = at));
    if (scrollTop < NEAR_PX) onNearTop?.();
    if (below < NEAR_PX) onNearEnd?.();
  };
  // Absolutely placed: a scroll lays out and paints only the rows that appear.
  return (
    <div className="virtual" ref={box} style={{ height }} role={role} aria-live="off" aria-label={label} tabIndex={0} onScroll={onScroll}>
      <div className="virtual-all" style={{ height: rows.getTotalSize(), minWidth: width }}>
        {rows.getVirtualItems().map(({ key, index, start, size }) => (
          <div key={key} className="virtual-row" style={{ top: start, height: size }}>
            {row(index)}
          </div>
        ))}
      </div>
    </div>
  );
}
