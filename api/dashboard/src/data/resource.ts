/** Something that is read from the API, shown while it is read again, and kept up to date. */

import { useCallback, useEffect, useRef, useState } from "react";
import { useLive, useLiveStatus, useShared } from "./context";

export interface Resource<T> {
  value: T | undefined;
  error: Error | null;
  /** The first reading is under way. */
  loading: boolean;
  /** When `value` was read; milliseconds. */
  at: number | null;
  reload: () => Promise<void>;
  /** Change what is shown by what a stream or an answer told. */
  set: (change: (value: T | undefined) => T | undefined) => void;
}

export interface ResourceOptions {
  /** Read again so often; milliseconds. Without it: only while the live stream is away. */
  every_ms?: number;
}

const WITHOUT_STREAM_MS = 5_000;

interface Held<T> {
  key: string | null;
  value: T | undefined;
  error: Error | null;
  at: number | null;
}

/** `key` names the thing (null: read nothing); `load` reads it. */
export function useResource<T>(
  key: string | null,
  load: (signal: AbortSignal) => Promise<T>,
  options: ResourceOptions = {},
): Resource<T> {
  const { cache, live } = useShared();
  const streaming = useLiveStatus().state === "live";
  const [held, setHeld] = useState<Held<T>>(() => remembered(cache.get(key ?? ""), key));
  const newest = useRef({ key, load });
  const under = useRef<AbortController | null>(null);
  /** Not asked for yet: it need not be asked for again when the stream begins. */
  const unasked = useRef(true);
  newest.current = { key, load };

  const reload = useCallback(async () => {
    const asked = newest.current;
    if (asked.key === null) return;
    under.current?.abort();
    const mine = (under.current = new AbortController());
    try {
      const value = await asked.load(mine.signal);
      if (mine.signal.aborted) return;
      cache.set(asked.key, value);
      setHeld({ key: asked.key, value, error: null, at: Date.now() });
    } catch (error) {
      if (mine.signal.aborted) return;
      setHeld((old) => ({
        ...(old.key === asked.key ? old : { key: asked.key, value: undefined, at: null }),
        error: error as Error,
      }));
    }
  }, [cache]);

  useEffect(() => {
    setHeld((old) => (old.key === key ? old : remembered(cache.get(key ?? ""), key)));
    let gone = false;
    unasked.current = true;
    void live.begun().then(() => {
      if (gone) return;
      unasked.current = false;
      void reload();
    });
    return () => {
      gone = true;
      under.current?.abort();
    };
  }, [cache, live, key, reload]);

  const every_ms = options.every_ms ?? (streaming ? null : WITHOUT_STREAM_MS);
  useEffect(() => {
    if (every_ms === null || key === null) return;
    const timer = setInterval(() => {
      if (!document.hidden) void reload();
    }, every_ms);
    return () => clearInterval(timer);
  }, [every_ms, key, reload]);

  useLive("begun", () => {
    if (!unasked.current) void reload();
  });

  const set = useCallback((change: (value: T | undefined) => T | undefined) => {
    setHeld((old) => {
      const value = change(old.value);
      if (value !== undefined && old.key !== null) cache.set(old.key, value);
      return { ...old, value, at: Date.now() };
    });
  }, [cache]);

  const current = held.key === key ? held : remembered<T>(cache.get(key ?? ""), key);
  return {
    value: current.value,
    error: current.error,
    loading: current.value === undefined && current.error === null && key !== null,
    at: current.at,
    reload,
    set,
  };
}

function remembered<T>(entry: { value: unknown; at: number } | undefined, key: string | null): Held<T> {
  return { key, value: entry?.value as T | undefined, error: null, at: entry?.at ?? null };
}
