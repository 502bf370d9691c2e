import { useCallback, useSyncExternalStore } from "react";

/** Whether a media query matches. */
export function useMedia(query: string): boolean {
  const subscribe = useCallback((watcher: () => void) => {
    const list = matchMedia(query);
    list.addEventListener("change", watcher);
    return () => list.removeEventListener("change", watcher);
  }, [query]);
  return useSyncExternalStore(subscribe, () => matchMedia(query).matches);
}
