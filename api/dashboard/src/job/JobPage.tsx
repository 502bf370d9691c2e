/** The page of a job: its tabs, and above most of them the time ribbon. The interval brushed on the
 * ribbon filters every tab; it is in the URL like every other choice. */

import { lazy, Suspense, useCallback, useEffect, useMemo, useState } from "react";
import { Link, useLocation } from "wouter";

import { JobActions } from "../actions/JobActions";
import { ApiError, get } from "../api/client";
import { ended, type JobView, type TimelineView } from "../api/types";
import { REMOVED, UNKNOWN_JOB, useJob, useResource, useVerdict, useWatchedJob, type Resource } from "../data";
import { shortId } from "../format";
import { useShortcuts } from "../keyboard/keys";
import { ErrorBoundary } from "../ui/boundary";
import { Missing, PageNotFound } from "../ui/missing";
import { Failure } from "../ui/notice";
import { StateLabel } from "../ui/state";
import { clipped, type Window } from "./axis";
import { JobTabs } from "./JobTabs";
import { ChartsSection } from "./ChartsSection";
import { isProgram, meaningful } from "./level";
import { useChoices } from "./choices";
import { CursorProvider, newCursor } from "./cursor";
import { EventList } from "./incidents/EventList";
import { useOnce } from "./hooks";
import { IncidentsSection } from "./incidents/IncidentsSection";
import { LogSection } from "./logs/LogSection";
import { Overview } from "./Overview";
import { RanksSection } from "./RanksSection";
import { Ribbon } from "./Ribbon";
import { Placeholder, Section } from "./Section";
import { SpecView } from "./SpecView";
import { IN_TIME, TABS, tabName, tabOf, tabPath, type Tab } from "./tabs";
import { useIncidentsOf, useTimelineOf } from "./useJobPage";
import { VerdictCard } from "./VerdictCard";
import { presentWorld } from "./worldLayout";
import "uplot/dist/uPlot.min.css";
import "./job.css";

const Checkpoints = lazy(() => import("../checkpoints/Checkpoints").then((module) => ({ default: module.Checkpoints })));

interface JobPageProps {
  id: string;
  /** The last part of the path; undefined: the overview. */
  tab: string | undefined;
}

export default function JobPage({ id, tab }: JobPageProps) {
  useWatchedJob(id);
  const found = useJob(id);
  const job = found.value;
  const shown = tabOf(tab);
  if (shown === null) return <PageNotFound />;
  if (found.error === REMOVED) return <Missing title="Job removed">{REMOVED.message}</Missing>;
  if (found.error instanceof ApiError && found.error.code === UNKNOWN_JOB) return <UnknownJob id={id} />;
  if (!job) {
    return (
      <div className="page" aria-busy={found.loading}>
        {found.error && <Failure error={found.error} retry={() => void found.reload()} />}
      </div>
    );
  }
  return <Loaded key={id} job={job} tab={shown} changed={() => void found.reload()} />;
}

const UnknownJob = ({ id }: { id: string }) => (
  <Missing title="Unknown job">
    This server has no job <code>{id}</code>. It may have been removed, or the link is of another server.
  </Missing>
);

/** The other data waits for the verdict and the ribbon no longer than this. */
const FIRST_WAIT_MS = 2000;

interface LoadedProps {
  job: JobView;
  tab: Tab;
  changed: () => void;
}

function Loaded({ job, tab, changed }: LoadedProps) {
  const { id } = job;
  const [, go] = useLocation();
  const title = `${job.name}${tab === "overview" ? "" : `: ${tabName(tab, job)}`} · Holdfast`;
  useEffect(() => {
    document.title = title;
  }, [title]);
  const [cursor] = useState(newCursor);
  const choices = useChoices();
  const verdict = useVerdict(id);
  const timeline = useTimelineOf(id, job.state);
  const whole = timeline.value;
  const brush = useMemo(
    () => (choices.brush && whole ? clipped(choices.brush, whole) : null),
    [choices.brush, whole],
  );
  const live = !ended(job.state);
  const loaded = [verdict, timeline].every((part) => part.value !== undefined || part.error !== null);
  const rest = useOnce(loaded, FIRST_WAIT_MS);
  const spec = useMemo(() => meaningful(job.spec, isProgram(job)), [job.spec, job.brings]);
  const incidents = useIncidentsOf(id, rest);
  const world = !live || job.state === "QUEUED" ? null : presentWorld(whole);
  const faults = useResource<{ fault_injection: boolean }>(rest ? "fault injection" : null, (signal) =>
    get("/cluster", {}, signal),
  );
  const open = useCallback(
    (to: Tab, changes: Record<string, string> = {}) => go(tabPath(id, to, location.search, changes)),
    [go, id],
  );
  const openIncident = useCallback((number: number) => open("incidents", { incident: String(number) }), [open]);
  const openRank = useCallback((rank: number) => open("ranks", { rank: String(rank) }), [open]);
  useShortcuts("Job", [
    ...TABS.map((to, index) => ({ keys: String(index + 1), label: tabName(to, job), run: () => open(to) })),
    { keys: "0", label: "Show the whole run", run: () => choices.setBrush(null) },
  ]);
  const content = () => {
    switch (tab) {
      case "overview":
        return <Overview {...{ job, brush, choices, openRank, live }} wanted={rest} incidents={incidents.value} />;
      case "charts":
        return <ChartsSection {...{ job, brush, choices }} wanted={rest} incidents={incidents.value ?? []} />;
      case "ranks":
        return <RanksSection {...{ job, brush, choices, openRank, live }} wanted={choices.brush === null || brush !== null} onIncident={openIncident} />;
      case "incidents":
        return <IncidentsSection found={incidents} window={brush} chosen={choices.incident} onRank={openRank} />;
      case "logs":
        return <LogSection {...{ job, brush, choices, live }} />;
      case "checkpoints":
        return (
          <Section id="checkpoints" name="Checkpoints">
            <Checkpoints id={id} />
          </Section>
        );
      case "events":
        return (
          <Section id="events" name="Events">
            <EventList jobId={id} newest={job.event_seq} window={brush} />
          </Section>
        );
      case "spec":
        return (
          <Section id="spec" name="Spec" note="Including the default values.">
            <SpecView
              jobId={id}
              name={job.name}
              spec={spec}
              against={choices.against}
              onAgainst={(other) => choices.set({ against: other || null })}
            />
          </Section>
        );
    }
  };
  return (
    <CursorProvider value={cursor}>
      <div className="page job">
        <header>
          <div className="job-name">
            <p className="small">
              <Link to="/jobs">Jobs</Link> <span className="dim" title={id}>/ {shortId(id)}</span>
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
        <JobTabs job={job} shown={tab} incidents={incidents.value?.length} brush={brush} onClear={() => choices.setBrush(null)} />
        {tab === "overview" && <VerdictCard job={job} verdict={verdict.value} world={world} />}
        {IN_TIME.has(tab) && <Time timeline={timeline} brush={brush} onBrush={choices.setBrush} onIncident={openIncident} />}
        <ErrorBoundary key={tab}>
          <Suspense fallback={<Placeholder height={200} />}>{content()}</Suspense>
        </ErrorBoundary>
      </div>
    </CursorProvider>
  );
}

interface TimeProps {
  timeline: Resource<TimelineView>;
  brush: Window | null;
  onBrush: (brush: Window | null) => void;
  onIncident: (number: number) => void;
}

function Time({ timeline, brush, onBrush, onIncident }: TimeProps) {
  const whole = timeline.value;
  return (
    <Section id="time" name="Time" note="Drag to select an interval; charts, ranks, incidents, log and events follow.">
      {timeline.error && !whole && <Failure error={timeline.error} retry={() => void timeline.reload()} />}
      {whole ? (
        <Ribbon timeline={whole} brush={brush} onBrush={onBrush} onIncident={onIncident} />
      ) : (
        <Placeholder height={150} />
      )}
    </Section>
  );
}
