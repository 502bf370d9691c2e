/** The path names the view, the query its filters. Both are in the URL, so a view can be shared,
 * reloaded and reached with the back button. */

import { useCallback, useMemo, type ReactNode } from "react";
import { Router, useLocation, type AroundNavHandler } from "wouter";
import { useSearch } from "wouter/use-browser-location";

/** A new view is shown from its top. The present address adds nothing to the history. */
const around: AroundNavHandler = (navigate, to, options) => {
  const before = location.pathname;
  if (to === before + location.search) return;
  navigate(to, options);
  if (location.pathname !== before) scrollTo(0, 0);
};

export const RouterProvider = ({ children }: { children: ReactNode }) => <Router aroundNav={around}>{children}</Router>;

export type FilterChanges = Record<string, string | readonly string[] | null>;

/** The query, and a function that changes parts of it (null removes) without leaving the page. */
export function useFilters(): [URLSearchParams, (changes: FilterChanges) => void] {
  const search = useSearch(); // of the browser: wouter's own would decode the query twice
  const [, go] = useLocation();
  const change = useCallback((changes: FilterChanges) => {
    const next = new URLSearchParams(location.search);
    for (const [key, value] of Object.entries(changes)) {
      next.delete(key);
      for (const item of value === null ? [] : typeof value === "string" ? [value] : value) {
        if (item !== "") next.append(key, item);
      }
    }
    const text = next.toString();
    go(`${location.pathname}${text ? `?${text}` : ""}`, { replace: true });
  }, [go]);
  return [useMemo(() => new URLSearchParams(search), [search]), change];
}
