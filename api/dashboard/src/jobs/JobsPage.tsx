/** The list of all jobs, searched by text and filtered by state, updated live. */

import { useCallback, useEffect, useRef, useState, type CSSProperties } from "react";
import { Link, useLocation } from "wouter";
import { STATES, type State } from "../api/types";
import { useQueuePlaces } from "../data";
import { count, plural } from "../format";
import { useShortcuts } from "../keyboard/keys";
import { useFilters, type FilterChanges } from "../routing/router";
import { Icon } from "../ui/icons";
import { useMedia } from "../ui/media";
import { Failure } from "../ui/notice";
import { StateIcon, tone, stateName } from "../ui/state";
import { VirtualRows } from "../ui/VirtualRows";
import { SORTS, filtersOf, type Filters, type Sort } from "./filters";
import { JobLine, JobLineHead, COLUMNS } from "./JobLine";
import { useJobs, type Jobs } from "./useJobs";
import "./jobs.css";

export default function JobsPage() {
  const [params, change] = useFilters();
  const filters = filtersOf(params);
  const jobs = useJobs(filters);
  const search = useRef<HTMLInputElement>(null);
  const { total } = jobs.list;
  useEffect(() => {
    document.title = "Jobs · Holdfast";
  }, []);
  useShortcuts("Jobs", [
    { keys: "/", label: "Search", run: () => search.current?.focus() },
  ]);
  return (
    <div className="page jobs-page">
      <header>
        <h1>Jobs</h1>
        <span className="dim" aria-live="polite">{jobs.loading ? "" : plural(total, "job")}</span>
        <div className="actions">
          <Search filters={filters} change={change} search={search} />
          <SortChoice filters={filters} change={change} />
          <Link to="/submit" className="button primary">
            <Icon name="submit" /> Submit a job
          </Link>
        </div>
      </header>
      <States filters={filters} counts={jobs.list.counts} change={change} />
      {jobs.error && <Failure error={jobs.error} retry={jobs.reload} />}
      <Lines jobs={jobs} filters={filters} clear={() => change({ q: null, state: null, owner: null })} />
    </div>
  );
}

interface FilterProps {
  filters: Filters;
  counts: Partial<Record<State, number>>;
  change: (changes: FilterChanges) => void;
  search: React.RefObject<HTMLInputElement | null>;
}

function Search({ filters, change, search }: Pick<FilterProps, "filters" | "change" | "search">) {
  const [text, setText] = useState(filters.q);
  useEffect(() => setText((typed) => (document.activeElement === search.current ? typed : filters.q)), [filters.q, search]);
  useEffect(() => {
    if (text === filters.q) return;
    const timer = setTimeout(() => change({ q: text }), 150);
    return () => clearTimeout(timer);
  }, [text, filters.q, change]);
  return (
    <div className="search" role="search">
      <Icon name="search" />
      <input
        ref={search} className="input" type="search" placeholder="Name, owner or id" aria-label="Search jobs by name, owner or id" value={text}
        onChange={(event) => setText(event.target.value)}
        onKeyDown={(event) => {
          if (event.key === "Escape") {
            setText("");
            event.currentTarget.blur();
          } else if (event.key === "Enter" || event.key === "ArrowDown") {
            event.preventDefault();
            document.querySelector<HTMLElement>("[data-row-link]")?.focus();
          }
        }}
      />
      <kbd className="only-wide" aria-hidden="true">/</kbd>
    </div>
  );
}

function SortChoice({ filters, change }: Pick<FilterProps, "filters" | "change">) {
  return (
    <select className="input order only-wide" aria-label="Order" value={filters.sort} onChange={(event) => change({ sort: event.target.value === "created" ? null : event.target.value })}>
      {(Object.keys(SORTS) as Sort[]).map((sort) => (
        <option key={sort} value={sort}>
          {SORTS[sort]}
        </option>
      ))}
    </select>
  );
}

function States({ filters, counts, change }: Pick<FilterProps, "filters" | "counts" | "change">) {
  const toggled = (state: State) =>
    filters.states.includes(state) ? filters.states.filter((other) => other !== state) : [...filters.states, state];
  const shown = STATES.filter((state) => counts[state] || filters.states.includes(state));
  return (
    <div className="chips" role="group" aria-label="States">
      {shown.map((state) => (
        <button
          key={state} type="button" className={`filter-chip ${tone(state)}`} aria-pressed={filters.states.includes(state)}
          onClick={() => change({ state: toggled(state) })}
        >
          <StateIcon state={state} />
          {stateName(state)}
          <b>{count(counts[state] ?? 0)}</b>
        </button>
      ))}
      {filters.owner !== null && (
        <button type="button" className="filter-chip" aria-pressed="true" onClick={() => change({ owner: null })} aria-label={`Owner ${filters.owner}: show all owners`}>
          {filters.owner} <Icon name="close" size={12} />
        </button>
      )}
    </div>
  );
}

/** As in jobs.css. The card ends after its last line, or at the end of the window. */
const LINE_PX = { wide: 46, narrow: 108, head: 37 };

interface LinesProps {
  jobs: Jobs;
  filters: Filters;
  clear: () => void;
}

function Lines({ jobs, filters, clear }: LinesProps) {
  const { rows, total } = jobs.list;
  const places = useQueuePlaces(rows.some((row) => row.state === "QUEUED"));
  const [, go] = useLocation();
  const narrow = useMedia("(max-width: 820px)");
  const [chosen, setChosen] = useState<number | null>(null);
  const moved = useRef(false);
  const { ensureRows } = jobs;
  const onView = useCallback((last: number) => ensureRows(last + 100), [ensureRows]);

  const move = (by: number) => {
    if (rows.length === 0) return;
    const next = Math.max(0, Math.min(rows.length - 1, (chosen ?? (by > 0 ? -1 : 0)) + by));
    moved.current = true;
    setChosen(next);
  };
  useEffect(() => {
    if (!moved.current || chosen === null) return;
    moved.current = false;
    const link = document.querySelector<HTMLElement>(`[data-row-link="${chosen}"]`);
    link?.focus({ preventScroll: true });
    link?.closest(".rows-place")?.scrollIntoView({ block: "nearest" });
  }, [chosen]);
  useShortcuts("List", [
    { keys: "j", label: "Next job", run: () => move(1) },
    { keys: "k", label: "Previous job", run: () => move(-1) },
    {
      keys: "Enter", label: "Open the job",
      run: (event) => {
        const row = rows[chosen ?? -1];
        const focused = event.target instanceof Element && event.target.closest("a, button");
        if (focused instanceof HTMLElement) focused.click();
        else if (row) go(`/jobs/${row.id}`);
      },
    },
    { keys: "Escape", label: "Clear the filters", run: clear },
  ]);

  if (!jobs.loading && total === 0 && !jobs.error) {
    const filtered = filters.q !== "" || filters.states.length > 0 || filters.owner !== null;
    return filtered ? <NothingMatches clear={clear} /> : <NoJobs />;
  }
  const shown = jobs.loading ? 12 : Math.max(total, rows.length);
  const height_px = narrow ? LINE_PX.narrow : LINE_PX.wide;
  const whole = { "--whole": `${shown * height_px + (narrow ? 0 : LINE_PX.head) + 2}px` };
  return (
    <div className="card lines" style={whole as CSSProperties}>
      <VirtualRows
        label="Jobs" count={shown} columns={COLUMNS.length} height_px={height_px} kept={chosen} onView={onView}
        head={<JobLineHead />}
        row={(index) => (
          <JobLine index={index} row={rows[index]} place={places.get(rows[index]?.id ?? "")} chosen={index === chosen} onChoose={setChosen} />
        )}
      />
    </div>
  );
}

function NothingMatches({ clear }: Pick<LinesProps, "clear">) {
  return (
    <div className="card empty">
      <h2>No job matches</h2>
      <p>Try another search or other states.</p>
      <button type="button" className="button" onClick={clear}>
        Show all jobs
      </button>
    </div>
  );
}

function NoJobs() {
  return (
    <div className="card empty">
      <h2>No jobs yet</h2>
      <p>
        Submit the first one here, or with <code>holdfast submit job.yaml</code>.
      </p>
      <Link to="/submit" className="button primary">
        <Icon name="submit" /> Submit a job
      </Link>
    </div>
  );
}
