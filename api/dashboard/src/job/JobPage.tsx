/** The page of a job: verdict, time ribbon, ranks, charts, incidents, log, checkpoints, events and
 * spec. The interval brushed on the time ribbon filters the sections below it; it is in the URL like
 * every other choice. */

import { lazy, useCallback, useEffect, useMemo, useState } from "react";
import { Link } from "wouter";

import { JobActions } from "../actions/JobActions";
import { get } from "../api/client";
import { ended, type JobView, type TimelineView, type VerdictView } from "../api/types";
import { useJob, useResource, useVerdict, useWatchedJob, type Resource } from "../data";
import { shortId } from "../format";
import { useShortcuts } from "../keyboard/keys";
import { Failure } from "../ui/notice";
import { StateLabel } from "../ui/state";
import { clipped, type Window } from "./axis";
import { JobBar, SECTIONS } from "./JobBar";
import { ChartsSection } from "./ChartsSection";
import { LevelCard } from "./LevelCard";
import { isProgram, meaningful } from "./level";
import { useChoices, type Choices } from "./choices";
import { CursorProvider, newCursor } from "./cursor";
import { EventList } from "./incidents/EventList";
import { useDebounced, useOnce } from "./hooks";
import { IncidentCards, incidentsWithin } from "./incidents/IncidentCards";
import { LogSection } from "./logs/LogSection";
import { RanksSection } from "./RanksSection";
import { Ribbon } from "./Ribbon";
import { Placeholder, Section, WhenNear } from "./Section";
import { SpecView } from "./SpecView";
import { useHistoryOf, useIncidentsOf, useTimelineOf } from "./useJobPage";
import { VerdictCard } from "./VerdictCard";
import type { RankHistory } from "./views";
import { presentWorld } from "./worldLayout";
import "uplot/dist/uPlot.min.css";
import "./job.css";

const Checkpoints = lazy(() => import("../checkpoints/Checkpoints").then((module) => ({ default: module.Checkpoints })));

/** The verdict, the ribbon and the ranks load first, together with the job itself: they answer the
 * most common questions. */
export default function JobPage({ id }: { id: string }) {
  useWatchedJob(id);
  const found = useJob(id);
  const job = found.value;
  const choices = useChoices();
  const verdict = useVerdict(id);
  const timeline = useTimelineOf(id, job?.state);
  const whole = timeline.value;
  const brush = useMemo(
    () => (choices.brush && whole ? clipped(choices.brush, whole) : null),
    [choices.brush, whole],
  );
  const live = !job || !ended(job.state);
  const shown = useDebounced(brush, 120);
  const placed = choices.brush === null || shown !== null;
  const history = useHistoryOf(id, choices.of, shown, placed, live);
  const loaded = [verdict, timeline, history].every((part) => part.value !== undefined || part.error !== null);
  const rest = useOnce(loaded, FIRST_WAIT_MS);
  useEffect(() => {
    if (job) document.title = `${job.name} · Holdfast`;
    return () => void (document.title = "Holdfast");
  }, [job?.name]);
  if (!job) {
    return (
      <div className="page" aria-busy={found.loading}>
        {found.error && <Failure error={found.error} retry={() => void found.reload()} />}
      </div>
    );
  }
  return (
    <Loaded
      key={id}
      {...{ job, choices, verdict, timeline, history, brush, live, rest }}
      changed={() => void found.reload()}
    />
  );
}

/** The other sections wait for the first ones no longer than this. */
const FIRST_WAIT_MS = 2000;

interface LoadedProps {
  job: JobView;
  choices: Choices;
  verdict: Resource<VerdictView>;
  timeline: Resource<TimelineView>;
  history: Resource<RankHistory>;
  brush: Window | null;
  live: boolean;
  /** Whether the other sections may load. */
  rest: boolean;
  changed: () => void;
}

function Loaded({ job, choices, verdict, timeline, history, brush, live, rest, changed }: LoadedProps) {
  const { id } = job;
  const [cursor] = useState(newCursor);
  const spec = useMemo(() => meaningful(job.spec, isProgram(job)), [job.spec, job.brings]);
  const incidents = useIncidentsOf(id, rest);
  const whole = timeline.value;
  const world = ended(job.state) || job.state === "QUEUED" ? null : presentWorld(whole);
  const faults = useResource<{ fault_injection: boolean }>(rest ? "fault injection" : null, (signal) =>
    get("/cluster", {}, signal),
  );
  const openIncident = useCallback(
    (number: number) => {
      choices.set({ incident: String(number), rank: null });
      requestAnimationFrame(() =>
        document.getElementById(`incident-${number}`)?.scrollIntoView({ block: "center" }),
      );
    },
    [choices],
  );
  const openRank = useCallback((rank: number) => choices.set({ rank: String(rank) }), [choices]);
  useShortcuts("Job", [
    ...SECTIONS.map(([part, name], index) => ({
      keys: String(index + 1),
      label: name,
      run: () => document.getElementById(part)?.scrollIntoView(),
    })),
    { keys: "0", label: "Show the whole run", run: () => choices.setBrush(null) },
  ]);
  return (
    <CursorProvider value={cursor}>
      <div className="page job">
        <header>
          <div className="job-name">
            <p className="small">
              <Link to="/jobs">Jobs</Link> <span className="dim">/ {shortId(id)}</span>
            </p>
            <div className="line wrap">
              <h1>{job.name}</h1>
              <StateLabel state={job.state} chip />
            </div>
          </div>
          <div className="actions">
            <JobActions
              job={job}
              world={world}
              faultInjection={faults.value?.fault_injection ?? false}
              onChanged={changed}
            />
          </div>
        </header>
        <VerdictCard job={job} verdict={verdict.value} world={world} />
        <LevelCard job={job} />
        <JobBar brush={brush} onClear={() => choices.setBrush(null)} />
        <Section id="time" name="Time" note="Drag to select an interval; the sections below follow.">
          {timeline.error && !whole && <Failure error={timeline.error} retry={() => void timeline.reload()} />}
          {whole ? (
            <Ribbon timeline={whole} brush={brush} onBrush={choices.setBrush} onIncident={openIncident} />
          ) : (
            <Placeholder height={150} />
          )}
        </Section>
        <RanksSection job={job} history={history} brush={brush} choices={choices} openRank={openRank} live={live} onIncident={openIncident} />
        <ChartsSection job={job} wanted={rest} brush={brush} choices={choices} incidents={incidents.value ?? NO_INCIDENTS} />
        <Section
          id="incidents"
          name="Incidents"
          count={incidents.value ? incidentsWithin(incidents.value, brush) : undefined}
        >
          {incidents.error && !incidents.value && (
            <Failure error={incidents.error} retry={() => void incidents.reload()} />
          )}
          {incidents.value ? (
            <IncidentCards
              incidents={incidents.value}
              window={brush}
              chosen={choices.incident}
              onRank={openRank}
            />
          ) : (
            <Placeholder height={80} />
          )}
        </Section>
        <LogSection job={job} brush={brush} choices={choices} live={live} />
        <Section id="checkpoints" name="Checkpoints">
          <WhenNear height={140}>
            <div className="checkpoints-box">
              <Checkpoints id={id} />
            </div>
          </WhenNear>
        </Section>
        <Section id="events" name="Events">
          <WhenNear height={336}>
            <EventList jobId={id} newest={job.event_seq} window={brush} />
          </WhenNear>
        </Section>
        <Section id="spec" name="Spec" note="Including the default values.">
          <WhenNear height={400}>
            <SpecView
              jobId={id}
              name={job.name}
              spec={spec}
              against={choices.against}
              onAgainst={(other) => choices.set({ against: other || null })}
            />
          </WhenNear>
        </Section>
      </div>
    </CursorProvider>
  );
}

const NO_INCIDENTS: never[] = [];
