/** The data of the job page: loaded once, then kept up to date by the tab's stream. */

import { useMemo } from "react";

import { get } from "../api/client";
import { jobPath, useLive, useReloadOn, useResource, type Resource } from "../data";
import { unpacked, type Packed } from "./heatmap/packed";
import { merged, stepsWithin } from "./series";
import {
  TERMINAL,
  type HeatQuantity,
  type Incident,
  type Metrics,
  type RankDetail,
  type RankHistory,
  type Ranks,
  type State,
  type Timeline,
} from "./views";
import type { Window } from "./axis";

const POINTS = 800;
const BUCKETS = 120;

/** Events after which the timeline of a job is loaded again. */
const TIMELINE_EVENTS = /^(attempt|incident|job|checkpoint\.saved|ended|phase|guard|waiting)/;

export function useTimelineOf(id: string, state: State | undefined): Resource<Timeline> {
  const over = state !== undefined && TERMINAL.has(state);
  const found = useResource<Timeline>(
    `ribbon ${id}`,
    (signal) => get(jobPath(id, "/timeline"), {}, signal),
    over ? {} : { every_ms: 10_000 },
  );
  useReloadOn(found, 1000, TIMELINE_EVENTS);
  return found;
}

/** `wanted` false: the more urgent sections load first. */
export function useIncidentsOf(id: string, wanted: boolean): Resource<Incident[]> {
  const found = useResource<Incident[]>(wanted ? `cards ${id}` : null, (signal) => get(jobPath(id, "/incidents"), {}, signal));
  useReloadOn(found, 700, /^incident/);
  return found;
}

/** The metrics of the whole run, thinned, or of the steps in a window in more detail. */
export function useMetricsOf(id: string, window: Window | null, wanted: boolean): Resource<Metrics> {
  const found = useResource<Metrics>(wanted ? `charts ${id}` : null, (signal) =>
    get(jobPath(id, "/metrics"), { points: POINTS, discarded: true }, signal),
  );
  useLive("metrics", ({ points }) => {
    found.set((old) => old && merged(old, points, POINTS));
  });
  useReloadOn(found, 3000, /^(incident\.closed|attempt\.running|guard)/);
  const steps = window && found.value ? stepsWithin(found.value, window) : null;
  const near = useResource<Metrics>(
    steps ? `charts ${id} ${steps.after} ${steps.until}` : null,
    (signal) =>
      get(
        jobPath(id, "/metrics"),
        { points: POINTS, discarded: true, after_step: steps?.after, until_step: steps?.until },
        signal,
      ),
  );
  return steps && near.value ? { ...found, value: near.value } : found;
}

/** `wanted`: the drawer of a rank is open. */
export function useRanksOf(id: string, wanted: boolean): Resource<Ranks> {
  const found = useResource<Ranks>(wanted ? `ranks ${id}` : null, (signal) => get(jobPath(id, "/ranks"), {}, signal));
  useLive("ranks", (value) => found.set(() => value as Ranks));
  return found;
}

/** `window` null: the whole run of the job. `wanted` false: the window is not known yet. */
export function useHistoryOf(
  id: string,
  of: HeatQuantity,
  window: Window | null,
  wanted: boolean,
  live: boolean,
): Resource<RankHistory> {
  const key = wanted ? `heat ${id} ${of} ${window?.since ?? ""} ${window?.until ?? ""}` : null;
  return useResource<RankHistory>(
    key,
    async (signal) => {
      const params = { of, buckets: BUCKETS, since: window?.since, until: window?.until };
      return unpacked(await get<Packed>(jobPath(id, "/ranks/heat"), params, signal));
    },
    live && !window ? { every_ms: 20_000 } : {},
  );
}

export function useRankOf(id: string, rank: number): Resource<RankDetail> {
  const found = useResource<RankDetail>(`rank ${id} ${rank}`, (signal) =>
    get(jobPath(id, `/ranks/${rank}`), {}, signal),
  );
  useReloadOn(found, 1000, /^(attempt|incident)/);
  return found;
}

/** The numbers of all attempts, the newest first. */
export function useAttemptNumbers(newest: number): number[] {
  return useMemo(() => Array.from({ length: newest }, (_, index) => newest - index), [newest]);
}
