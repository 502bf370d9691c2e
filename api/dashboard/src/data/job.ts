/** The data of a job, kept up to date by the tab's stream. */

import { useState } from "react";

import { get } from "../api/client";
import type { CheckpointPage, JobView, VerdictView } from "../api/types";
import { useLive } from "./context";
import { useResource, type Resource } from "./resource";
import { useThrottled } from "./throttle";

export const jobPath = (id: string, part = ""): string => `/jobs/${encodeURIComponent(id)}${part}`;

/** Loads again at each event of these kinds, at most every `interval_ms`. */
export function useReloadOn(found: Pick<Resource<unknown>, "reload">, interval_ms: number, kinds = /^/): void {
  const soon = useThrottled(() => void found.reload(), interval_ms);
  useLive("event", (event) => {
    if (kinds.test(event.kind)) soon();
  });
}

export function useJob(id: string | null): Resource<JobView> {
  const found = useResource<JobView>(id === null ? null : `job ${id}`, (signal) => get(jobPath(id ?? ""), {}, signal));
  useLive("job", (value) => {
    if (value.id === id) found.set(() => value);
  });
  const [removed, setRemoved] = useState<string | null>(null);
  useLive("removed", (job) => {
    if (job.id === id) setRemoved(id);
  });
  return removed !== null && removed === id ? { ...found, value: undefined, error: REMOVED } : found;
}

/** Instead of the job, once it is removed. */
export const REMOVED = new Error("This job was removed with its history.");

export function useCheckpoints(id: string): Resource<CheckpointPage> {
  const found = useResource<CheckpointPage>(`checkpoints ${id}`, (signal) => get(jobPath(id, "/checkpoints"), {}, signal));
  useReloadOn(found, 1000);
  return found;
}

export function useVerdict(id: string): Resource<VerdictView> {
  const found = useResource<VerdictView>(`verdict ${id}`, (signal) => get(jobPath(id, "/verdict"), {}, signal));
  useReloadOn(found, 500);
  useLive("metrics", useThrottled(() => void found.reload(), 5000));
  return found;
}
