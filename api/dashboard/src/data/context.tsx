/** The state shared by all views: the live stream and a cache of loaded values. */

import { createContext, useContext, useEffect, useRef, useSyncExternalStore, type ReactNode } from "react";
import { Live, type LiveEvents, type LiveKind, type LiveStatus } from "./live";

/** Values by key, limited to the most recently stored ones; going back shows a page at once. */
export class Cache {
  private readonly values = new Map<string, { value: unknown; at: number }>();

  get(key: string): { value: unknown; at: number } | undefined {
    return this.values.get(key);
  }

  set(key: string, value: unknown): void {
    this.values.delete(key);
    this.values.set(key, { value, at: Date.now() });
    const oldest = this.values.keys().next().value;
    if (this.values.size > 60 && oldest !== undefined) this.values.delete(oldest);
  }
}

interface Shared {
  live: Live;
  cache: Cache;
}

const Context = createContext<Shared | null>(null);

/** `live`: already started, so that the stream does not wait for the first render. */
export function DataProvider({ live, children }: { live: Live; children: ReactNode }) {
  const shared = useRef<Shared | null>(null);
  shared.current ??= { live, cache: new Cache() };
  return <Context.Provider value={shared.current}>{children}</Context.Provider>;
}

/** The id of the job in a path, or null. */
export function jobOf(path: string): string | null {
  const id = /^\/jobs\/([^/]+)/.exec(path)?.[1];
  return id === undefined ? null : id;
}

export function useShared(): Shared {
  const shared = useContext(Context);
  if (!shared) throw new Error("outside of DataProvider");
  return shared;
}

/** Calls the newest `handler` with each message of a kind. */
export function useLive<K extends LiveKind>(kind: K, handler: (value: LiveEvents[K]) => void): void {
  const { live } = useShared();
  const newest = useRef(handler);
  useEffect(() => {
    newest.current = handler;
  });
  useEffect(() => live.on(kind, (value) => newest.current(value)), [live, kind]);
}

export function useLiveStatus(): LiveStatus {
  const { live } = useShared();
  return useSyncExternalStore(live.onStatus, live.status);
}

/** While mounted, the tab's stream includes the messages of this job. */
export function useWatchedJob(id: string): void {
  const { live } = useShared();
  useEffect(() => {
    live.watch(id);
    return () => live.watch(null);
  }, [live, id]);
}
