/** The state shared by all views: the live stream and the loaded values. */

import { QueryClientProvider } from "@tanstack/react-query";
import { createContext, useContext, useEffect, useRef, useState, useSyncExternalStore, type ReactNode } from "react";
import { Live, type LiveEvents, type LiveKind, type LiveStatus } from "./live";
import { loadAgain, newClient } from "./loading";

const LiveContext = createContext<Live | null>(null);

/** `live`: already started, so that the stream does not wait for the first render. */
export function DataProvider({ live, children }: { live: Live; children: ReactNode }) {
  const [client] = useState(newClient);
  useEffect(() => live.on("begun", () => void loadAgain(client)), [live, client]);
  return (
    <LiveContext.Provider value={live}>
      <QueryClientProvider client={client}>{children}</QueryClientProvider>
    </LiveContext.Provider>
  );
}

/** The id of the job in a path, or null. */
export function jobOf(path: string): string | null {
  const id = /^\/jobs\/([^/]+)/.exec(path)?.[1];
  return id === undefined ? null : id;
}

export function useLiveStream(): Live {
  const live = useContext(LiveContext);
  if (!live) throw new Error("outside of DataProvider");
  return live;
}

/** Calls the newest `handler` with each message of a kind. */
export function useLive<K extends LiveKind>(kind: K, handler: (value: LiveEvents[K]) => void): void {
  const live = useLiveStream();
  const newest = useRef(handler);
  useEffect(() => {
    newest.current = handler;
  });
  useEffect(() => live.on(kind, (value) => newest.current(value)), [live, kind]);
}

export function useLiveStatus(): LiveStatus {
  const live = useLiveStream();
  return useSyncExternalStore(live.onStatus, live.status);
}

/** While mounted, the tab's stream includes the messages of this job. */
export function useWatchedJob(id: string): void {
  const live = useLiveStream();
  useEffect(() => {
    live.watch(id);
    return () => live.watch(null);
  }, [live, id]);
}
