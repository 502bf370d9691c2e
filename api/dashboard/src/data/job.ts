/** The data of a job, kept up to date by the tab's stream. */

import { get } from "../api/client";
import type {
  AttemptView, CheckpointsView, ClusterView, GoodputView, IncidentView, JobView, RanksView, TimelineView, VerdictView,
} from "../api/types";
import { useLive } from "./context";
import { useResource, type Resource } from "./resource";
import { useThrottled } from "./throttle";

const job = (id: string, rest = ""): string => `/jobs/${encodeURIComponent(id)}${rest}`;

export function useJob(id: string): Resource<JobView> {
  const found = useResource(`job ${id}`, (signal) => get<JobView>(job(id), {}, signal));
  useLive("job", (value) => {
    if (value.id === id) found.set(() => value);
  });
  return found;
}

/** Loads again at each new event of the job, at most every `interval_ms`. */
function useHistory<T>(id: string, part: string, load: (signal: AbortSignal) => Promise<T>, interval_ms: number): Resource<T> {
  const found = useResource(`${part} ${id}`, load);
  const reloadSoon = useThrottled(() => void found.reload(), interval_ms);
  useLive("event", reloadSoon);
  return found;
}

export const useAttempts = (id: string): Resource<AttemptView[]> =>
  useHistory(id, "attempts", (signal) => get(job(id, "/attempts"), {}, signal), 500);

export const useIncidents = (id: string): Resource<IncidentView[]> =>
  useHistory(id, "incidents", (signal) => get(job(id, "/incidents"), {}, signal), 500);

export const useGoodput = (id: string): Resource<GoodputView> =>
  useHistory(id, "goodput", (signal) => get(job(id, "/goodput"), {}, signal), 2000);

export const useCheckpoints = (id: string): Resource<CheckpointsView> =>
  useHistory(id, "checkpoints", (signal) => get(job(id, "/checkpoints"), {}, signal), 1000);

export function useVerdict(id: string): Resource<VerdictView> {
  const found = useHistory<VerdictView>(id, "verdict", (signal) => get(job(id, "/verdict"), {}, signal), 500);
  useLive("metrics", useThrottled(() => void found.reload(), 5000));
  return found;
}

/** `since` and `until` are Unix seconds; null: the whole run of the job. */
export function useTimeline(id: string, since: number | null, until: number | null): Resource<TimelineView> {
  return useHistory(
    id, `timeline ${since} ${until}`, (signal) => get(job(id, "/timeline"), { since, until }, signal), 1000,
  );
}

export function useRanks(id: string): Resource<RanksView> {
  const found = useHistory<RanksView>(id, "ranks", (signal) => get(job(id, "/ranks"), {}, signal), 1000);
  useLive("ranks", (value) => found.set(() => value));
  return found;
}

export const useCluster = (): Resource<ClusterView> =>
  useResource("cluster", (signal) => get<ClusterView>("/cluster", {}, signal), { every_ms: 3000 });
