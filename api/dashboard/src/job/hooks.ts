/** Small hooks of the job page: sizes, delays, downloads. */

import { useCallback, useEffect, useLayoutEffect, useRef, useState, type RefObject } from "react";

/** The width of an element in CSS pixels; 0 until it is laid out. */
export function useWidth<T extends HTMLElement>(): [RefObject<T | null>, number] {
  const ref = useRef<T | null>(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const element = ref.current;
    if (!element) return;
    setWidth(Math.floor(element.clientWidth));
    const watch = new ResizeObserver(() => setWidth(Math.floor(element.clientWidth)));
    watch.observe(element);
    return () => watch.disconnect();
  }, []);
  return [ref, width];
}

/** The value, once it has stayed the same for `ms`. */
export function useDebounced<T>(value: T, ms: number): T {
  const [later, setLater] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setLater(value), ms);
    return () => clearTimeout(timer);
  }, [value, ms]);
  return later;
}

/** Whether `now` was ever true, or the timeout has passed. */
export function useOnce(now: boolean, timeout_ms: number): boolean {
  const [once, setOnce] = useState(now);
  useEffect(() => {
    if (once) return;
    if (now) setOnce(true);
    const timer = setTimeout(() => setOnce(true), timeout_ms);
    return () => clearTimeout(timer);
  }, [once, now, timeout_ms]);
  return once;
}

/** Downloads a text under a file name, without a request. */
export function useSaveText(): (name: string, text: string) => void {
  return useCallback((name, text) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }, []);
}
