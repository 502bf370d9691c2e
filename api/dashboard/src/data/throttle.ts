/** Limits a function to a call per interval; the last requested call is always made, if late. */

import { useEffect, useMemo, useRef } from "react";

export function useThrottled(call: () => void, interval_ms: number): () => void {
  const newest = useRef(call);
  useEffect(() => {
    newest.current = call;
  });
  const timer = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  useEffect(() => () => clearTimeout(timer.current), []);
  return useMemo(() => {
    let last = -Infinity;
    return () => {
      if (timer.current !== undefined) return;
      const wait = Math.max(0, last + interval_ms - performance.now());
      timer.current = setTimeout(() => {
        timer.current = undefined;
        last = performance.now();
        newest.current();
      }, wait);
    };
  }, [interval_ms]);
}
