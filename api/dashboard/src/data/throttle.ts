/** At most one call in so many milliseconds; the last one asked for is made, late if need be. */

import { useEffect, useMemo, useRef } from "react";

export function useThrottled(call: () => void, least_ms: number): () => void {
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
      const wait = Math.max(0, last + least_ms - performance.now());
      timer.current = setTimeout(() => {
        timer.current = undefined;
        last = performance.now();
        newest.current();
      }, wait);
    };
  }, [least_ms]);
}
