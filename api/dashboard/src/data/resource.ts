/** A value loaded from the API, shown while it is loaded again, and kept up to date. */

import { useCallback, useEffect, useRef, useState } from "react";
import { useLive, useLiveStatus, useShared } from "./context";

export interface Resource<T> {
  value: T | undefined;
  error: Error | null;
  /** The first load is in progress. */
  loading: boolean;
  /** The time at which `value` was loaded; milliseconds. */
  at: number | null;
  reload: () => Promise<void>;
  /** Changes the value by data from a stream or a response. */
  set: (change: (value: T | undefined) => T | undefined) => void;
}

export interface ResourceOptions {
  /** The reload interval in milliseconds; without it, reloads only while the live stream is down. */
  every_ms?: number;
}

const POLL_MS = 5_000;

interface Held<T> {
  key: string | null;
  value: T | undefined;
  error: Error | null;
  at: number | null;
}

/** `key` names the value (null: load nothing); `load` loads it. */
export function useResource<T>(
  key: string | null,
  load: (signal: AbortSignal) => Promise<T>,
  options: ResourceOptions = {},
): Resource<T> {
  const { cache, live } = useShared();
  const streaming = useLiveStatus().state === "live";
  const [held, setHeld] = useState<Held<T>>(() => cached(cache.get(key ?? ""), key));
  const newest = useRef({ key, load });
  const inFlight = useRef<AbortController | null>(null);
  /** Not requested yet: no reload is needed when the stream begins. */
  const pending = useRef(true);
  newest.current = { key, load };

  const reload = useCallback(async () => {
    const request = newest.current;
    if (request.key === null) return;
    inFlight.current?.abort();
    const abort = (inFlight.current = new AbortController());
    try {
      const value = await request.load(abort.signal);
      if (abort.signal.aborted) return;
      cache.set(request.key, value);
      setHeld({ key: request.key, value, error: null, at: Date.now() });
    } catch (error) {
      if (abort.signal.aborted) return;
      setHeld((old) => ({
        ...(old.key === request.key ? old : { key: request.key, value: undefined, at: null }),
        error: error as Error,
      }));
    }
  }, [cache]);

  useEffect(() => {
    setHeld((old) => (old.key === key ? old : cached(cache.get(key ?? ""), key)));
    let unmounted = false;
    pending.current = true;
    void live.begun().then(() => {
      if (unmounted) return;
      pending.current = false;
      void reload();
    });
    return () => {
      unmounted = true;
      inFlight.current?.abort();
    };
  }, [cache, live, key, reload]);

  const every_ms = options.every_ms ?? (streaming ? null : POLL_MS);
  useEffect(() => {
    if (every_ms === null || key === null) return;
    const timer = setInterval(() => {
      if (!document.hidden) void reload();
    }, every_ms);
    return () => clearInterval(timer);
  }, [every_ms, key, reload]);

  useLive("begun", () => {
    if (!pending.current) void reload();
  });

  const set = useCallback((change: (value: T | undefined) => T | undefined) => {
    setHeld((old) => {
      const value = change(old.value);
      if (value !== undefined && old.key !== null) cache.set(old.key, value);
      return { ...old, value, at: Date.now() };
    });
  }, [cache]);

  const current = held.key === key ? held : cached<T>(cache.get(key ?? ""), key);
  return {
    value: current.value,
    error: current.error,
    loading: current.value === undefined && current.error === null && key !== null,
    at: current.at,
    reload,
    set,
  };
}

function cached<T>(entry: { value: unknown; at: number } | undefined, key: string | null): Held<T> {
  return { key, value: entry?.value as T | undefined, error: null, at: entry?.at ?? null };
}
