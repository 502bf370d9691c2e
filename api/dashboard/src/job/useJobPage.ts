/** What the job page shows, read once and kept up to date by the tab's stream. */

import { useMemo } from "react";

import { get } from "../api/client";
import { useLive, useResource, useThrottled, type Resource } from "../data";
import { unpacked, type Packed } from "./packed";
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
const path = (id: string, part: string) => `/jobs/${encodeURIComponent(id)}${part}`;

/** Events after which the story of a job has to be read again. */
const TELLING = /^(attempt|incident|job|checkpoint\.saved|ended|phase|guard|waiting)/;

function useRetold(reload: () => void, least_ms: number, kinds = TELLING): void {
  const soon = useThrottled(reload, least_ms);
  useLive("event", (event) => {
    if (kinds.test(event.kind)) soon();
  });
}

export function useTimelineOf(id: string, state: State | undefined): Resource<Timeline> {
  const over = state !== undefined && TERMINAL.has(state);
  const found = useResource<Timeline>(
    `ribbon ${id}`,
    (signal) => get(path(id, "/timeline"), {}, signal),
    over ? {} : { every_ms: 10_000 },
  );
  useRetold(() => void found.reload(), 1000);
  return found;
}

/** `wanted` false: more urgent things are read first. */
export function useIncidentsOf(id: string, wanted: boolean): Resource<Incident[]> {
  const found = useResource<Incident[]>(wanted ? `cards ${id}` : null, (signal) => get(path(id, "/incidents"), {}, signal));
  useRetold(() => void found.reload(), 700, /^incident/);
  return found;
}

/** The whole run, thinned; or, of a window, its steps in as much detail as there is room for. */
export function useMetricsOf(id: string, window: Window | null, wanted: boolean): Resource<Metrics> {
  const found = useResource<Metrics>(wanted ? `charts ${id}` : null, (signal) =>
    get(path(id, "/metrics"), { points: POINTS, discarded: true }, signal),
  );
  useLive("metrics", ({ points }) => {
    found.set((old) => old && merged(old, points, POINTS));
  });
  useRetold(() => void found.reload(), 3000, /^(incident\.closed|attempt\.running|guard)/);
  const steps = window && found.value ? stepsWithin(found.value, window) : null;
  const near = useResource<Metrics>(
    steps ? `charts ${id} ${steps.after} ${steps.until}` : null,
    (signal) =>
      get(
        path(id, "/metrics"),
        { points: POINTS, discarded: true, after_step: steps?.after, until_step: steps?.until },
        signal,
      ),
  );
  return steps && near.value ? { ...found, value: near.value } : found;
}

/** `wanted`: a rank is being looked at. */
export function useRanksOf(id: string, wanted: boolean): Resource<Ranks> {
  const found = useResource<Ranks>(wanted ? `ranks ${id}` : null, (signal) => get(path(id, "/ranks"), {}, signal));
  useLive("ranks", (value) => found.set(() => value as Ranks));
  return found;
}

/** `window` null: the whole life of the job. `wanted` false: it is not known yet which. */
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
      const asked = { of, buckets: BUCKETS, since: window?.since, until: window?.until };
      return unpacked(await get<Packed>(path(id, "/ranks/heat"), asked, signal));
    },
    live && !window ? { every_ms: 20_000 } : {},
  );
}

export function useRankOf(id: string, rank: number): Resource<RankDetail> {
  const found = useResource<RankDetail>(`rank ${id} ${rank}`, (signal) =>
    get(path(id, `/ranks/${rank}`), {}, signal),
  );
  useRetold(() => void found.reload(), 1000, /^(attempt|incident)/);
  return found;
}

/** Numbers of the attempts so far, the newest first. */
export function useAttemptNumbers(newest: number): number[] {
  return useMemo(() => Array.from({ length: newest }, (_, index) => newest - index), [newest]);
}
