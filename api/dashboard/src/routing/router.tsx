/** The router: the path names the view, the query its filters. Both are in the URL, so a view can be
 * shared, reloaded and reached with the back button. */

import {
  createContext, useCallback, useContext, useEffect, useMemo, useState, type AnchorHTMLAttributes, type ReactNode,
} from "react";

export interface Place {
  path: string;
  params: URLSearchParams;
}

interface Router extends Place {
  go: (to: string, options?: { replace?: boolean }) => void;
}

const Context = createContext<Router | null>(null);

const here = (): Place => ({ path: location.pathname, params: new URLSearchParams(location.search) });

export function RouterProvider({ children }: { children: ReactNode }) {
  const [place, setPlace] = useState(here);
  useEffect(() => {
    const moved = () => setPlace(here());
    addEventListener("popstate", moved);
    return () => removeEventListener("popstate", moved);
  }, []);
  const go = useCallback((to: string, { replace = false } = {}) => {
    const before = location.pathname;
    if (to === location.pathname + location.search) return;
    history[replace ? "replaceState" : "pushState"](null, "", to);
    setPlace(here());
    if (location.pathname !== before) scrollTo(0, 0);
  }, []);
  const router = useMemo(() => ({ ...place, go }), [place, go]);
  return <Context.Provider value={router}>{children}</Context.Provider>;
}

export function useRouter(): Router {
  const router = useContext(Context);
  if (!router) throw new Error("outside of RouterProvider");
  return router;
}

/** The query, and a function that changes parts of it (null removes) without leaving the page. */
export function useFilters(): [URLSearchParams, (changes: Record<string, string | readonly string[] | null>) => void] {
  const { path, params, go } = useRouter();
  const change = useCallback(
    (changes: Record<string, string | readonly string[] | null>) => {
      const next = new URLSearchParams(location.search);
      for (const [key, value] of Object.entries(changes)) {
        next.delete(key);
        for (const item of value === null ? [] : typeof value === "string" ? [value] : value) {
          if (item !== "") next.append(key, item);
        }
      }
      const text = next.toString();
      go(`${path}${text ? `?${text}` : ""}`, { replace: true });
    },
    [path, go],
  );
  return [params, change];
}

type LinkProps = AnchorHTMLAttributes<HTMLAnchorElement> & { to: string };

/** A link; a plain click navigates without loading the page again. */
export function Link({ to, onClick, ...rest }: LinkProps) {
  const { go } = useRouter();
  return (
    <a
      href={to}
      onClick={(event) => {
        onClick?.(event);
        const plain = event.button === 0 && !event.metaKey && !event.ctrlKey && !event.shiftKey && !event.altKey;
        if (event.defaultPrevented || !plain) return;
        event.preventDefault();
        go(to);
      }}
      {...rest}
    />
  );
}
