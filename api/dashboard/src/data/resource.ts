/** A value loaded from the API, shown while it is loaded again, and kept up to date. */

import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useCallback, useEffect, useRef } from "react";
import { useLiveStatus, useLiveStream } from "./context";
import { afterBegin, loadAgain, POLL_MS, type Load } from "./loading";

export interface Resource<T> {
  value: T | undefined;
  error: Error | null;
  /** The first load is in progress. */
  loading: boolean;
  reload: () => Promise<void>;
  /** Changes the value by data from a stream or a response; `undefined` changes nothing. */
  set: (change: (value: T | undefined) => T | undefined) => void;
}

export interface ResourceOptions {
  /** The reload interval in milliseconds; without it, reloads only while the live stream is down. */
  every_ms?: number;
  /** How long an unused value is kept, in milliseconds; going back shows a kept value at once. */
  kept_ms?: number;
}

const KEPT_MS = 300_000;

/** `key` names the value (null: load nothing); `load` loads it. */
export function useResource<T>(key: string | null, load: Load<T>, options: ResourceOptions = {}): Resource<T> {
  const client = useQueryClient();
  const live = useLiveStream();
  const streaming = useLiveStatus().state === "live";
  const { data, error } = useQuery<T>({
    queryKey: [key],
    queryFn: afterBegin(live, load),
    enabled: key !== null,
    gcTime: options.kept_ms ?? KEPT_MS,
    refetchInterval: options.every_ms ?? (streaming ? false : POLL_MS),
  });
  // An error stays while a value that was never loaded is requested again.
  const failed = useRef<{ key: string | null; error: Error } | null>(null);
  if (error) failed.current = { key, error };
  const shownError = error ?? (data === undefined && failed.current?.key === key ? failed.current.error : null);
  const reload = useCallback(() => loadAgain(client, { queryKey: [key], exact: true }), [client, key]);
  const set = useCallback(
    (change: (value: T | undefined) => T | undefined) => void (key !== null && client.setQueryData<T>([key], change)),
    [client, key],
  );
  return { value: data, error: shownError, loading: data === undefined && !shownError && key !== null, reload, set };
}

/** Loads a further page of a list while `key` is not null, and passes it to `add`. */
export function useFurtherPage<T>(key: string | null, load: Load<T>, add: (page: T) => void): Resource<T> {
  const page = useResource(key, load, { kept_ms: 0 });
  useEffect(() => {
    if (page.value !== undefined) add(page.value);
  }, [page.value]);
  return page;
}

/** The value, or the last known value while it is undefined. */
export function useLast<T>(value: T | undefined): T | undefined {
  const last = useRef(value);
  if (value !== undefined) last.current = value;
  return last.current;
}
