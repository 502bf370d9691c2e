/** How values are loaded and held: when a load begins, when it is repeated, and what drops it. */

import { QueryClient, type QueryFilters, type QueryFunctionContext } from "@tanstack/react-query";
import type { Live } from "./live";

export const POLL_MS = 5_000;

/** A tab that is hidden does not poll. A failed load is repeated by the poll or by the user. */
export function newClient(): QueryClient {
  return new QueryClient({
    defaultOptions: {
      queries: { retry: false, networkMode: "always", refetchOnWindowFocus: false, refetchOnReconnect: false },
    },
  });
}

/** Loads the values in use again. A load in progress is dropped: its answer may be older than the
 * change that requires the new load. */
export async function loadAgain(client: QueryClient, values: QueryFilters = {}): Promise<void> {
  await client.cancelQueries(values);
  await client.refetchQueries({ ...values, type: "active" });
}

/** Loads a value; `held` returns the present value. */
export type Load<T> = (signal: AbortSignal, held: () => T | undefined) => Promise<T>;

/** A load that waits for the stream's starting point, so that no change between both is missed. */
export function afterBegin<T>(live: Live, load: Load<T>) {
  return async ({ signal, client, queryKey }: QueryFunctionContext): Promise<T> => {
    await live.begun();
    signal.throwIfAborted();
    return load(signal, () => client.getQueryData<T>(queryKey));
  };
}
