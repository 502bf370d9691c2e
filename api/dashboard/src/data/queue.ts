/** The places of the waiting jobs in the queue. */

import { useMemo } from "react";
import { get } from "../api/client";
import type { ClusterView } from "../api/types";
import { useResource } from "./resource";

const EVERY_MS = 3000;
const NONE: ReadonlyMap<string, number> = new Map();

/** Job id -> place, from 1. `wanted` false: no job that waits is shown. */
export function useQueuePlaces(wanted: boolean): ReadonlyMap<string, number> {
  const { value } = useResource(wanted ? "queue" : null, (signal) => get<ClusterView>("/cluster", {}, signal), { every_ms: EVERY_MS });
  return useMemo(() => (value ? new Map(value.queue.map(({ job, place }) => [job, place])) : NONE), [value]);
}
