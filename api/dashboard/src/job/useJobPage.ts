/** The data of the job page: loaded once, then kept up to date by the tab's stream. */

import { useMemo } from "react";

import { get, getAll } from "../api/client";
import {
  ended, type IncidentView, type MetricPage, type RankDetailView, type RankHeatView, type RankMeasure, type RanksView, type State, type TimelineView,
} from "../api/types";
import { jobPath, useLive, useReloadOn, useResource, type Resource } from "../data";
import { unpacked } from "./heatmap/packed";
import { merged, stepsWithin } from "./series";
import type { RankHistory } from "./views";
import type { Window } from "./axis";

const POINTS = 800;
const BUCKETS = 120;

/** Events after which the timeline of a job is loaded again. */
const TIMELINE_EVENTS = /^(attempt|incident|job|checkpoint\.saved|ended|phase|guard|waiting)/;

export function useTimelineOf(id: string, state: State | undefined): Resource<TimelineView> {
  const over = state !== undefined && ended(state);
  const found = useResource<TimelineView>(
    `ribbon ${id}`,
    (signal) => get(jobPath(id, "/timeline"), {}, signal),
    over ? {} : { every_ms: 10_000 },
  );
  useReloadOn(found, 1000, TIMELINE_EVENTS);
  return found;
}

/** `wanted` false: the more urgent sections load first. */
export function useIncidentsOf(id: string, wanted: boolean): Resource<IncidentView[]> {
  const found = useResource<IncidentView[]>(wanted ? `cards ${id}` : null, (signal) => getAll(jobPath(id, "/incidents"), signal));
  useReloadOn(found, 700, /^incident/);
  return found;
}

/** The metrics of the whole run, thinned, or of the steps in a window in more detail. */
export function useMetricsOf(id: string, window: Window | null, wanted: boolean): Resource<MetricPage> {
  const found = useResource<MetricPage>(wanted ? `charts ${id}` : null, (signal) =>
    get(jobPath(id, "/metrics"), { points: POINTS, discarded: true }, signal),
  );
  useLive("metrics", ({ points }) => {
    found.set((old) => old && merged(old, points, POINTS));
  });
  useReloadOn(found, 3000, /^(incident\.closed|attempt\.running|guard)/);
  const steps = window && found.value ? stepsWithin(found.value, window) : null;
  const near = useResource<MetricPage>(
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
export function useRanksOf(id: string, wanted: boolean): Resource<RanksView> {
  const found = useResource<RanksView>(wanted ? `ranks ${id}` : null, (signal) => get(jobPath(id, "/ranks"), {}, signal));
  useLive("ranks", (value) => found.set(() => value as RanksView));
  return found;
}

/** `window` null: the whole run of the job. `wanted` false: the window is not known yet. */
export function useHistoryOf(
  id: string,
  of: RankMeasure,
  window: Window | null,
  wanted: boolean,
  live: boolean,
): Resource<RankHistory> {
  const key = wanted ? `heat ${id} ${of} ${window?.since ?? ""} ${window?.until ?? ""}` : null;
  return useResource<RankHistory>(
    key,
    async (signal) => {
      const params = { of, buckets: BUCKETS, since: window?.since, until: window?.until };
      return unpacked(await get<RankHeatView>(jobPath(id, "/ranks/heat"), params, signal));
    },
    live && !window ? { every_ms: 20_000 } : {},
  );
}

export function useRankOf(id: string, rank: number): Resource<RankDetailView> {
  const found = useResource<RankDetailView>(`rank ${id} ${rank}`, (signal) =>
    get(jobPath(id, `/ranks/${rank}`), {}, signal),
  );
  useReloadOn(found, 1000, /^(attempt|incident)/);
  return found;
}

/** The numbers of all attempts, the newest first. */
export function useAttemptNumbers(newest: number): number[] {
  return useMemo(() => Array.from({ length: newest }, (_, index) => newest - index), [newest]);
}
