/** The sticky bar of a job's page: its tabs, and the selected interval. */

import { useEffect, useRef } from "react";
import { Link } from "wouter";

import type { JobView } from "../api/types";
import type { Window } from "./axis";
import { clock, fineDuration } from "./format";
import { TABS, tabName, tabPath, type Tab } from "./tabs";

interface JobTabsProps {
  job: JobView;
  shown: Tab;
  incidents: number | undefined;
  brush: Window | null;
  onClear: () => void;
}

export function JobTabs({ job, shown, incidents, brush, onClear }: JobTabsProps) {
  const bar = useRef<HTMLElement>(null);
  const before = useRef(shown);
  useEffect(() => {
    const here = bar.current?.querySelector<HTMLElement>("[aria-current]");
    if (here && bar.current) bar.current.scrollLeft = here.offsetLeft - bar.current.offsetLeft - 40;
    // The link that led here may be gone with its tab: the keyboard goes on from the tab that is shown.
    if (before.current !== shown && document.activeElement === document.body) here?.focus({ preventScroll: true });
    before.current = shown;
  }, [shown]);
  return (
    <div className="job-bar">
      <nav aria-label="Views of this job" ref={bar}>
        {TABS.map((tab) => (
          <Link key={tab} to={tabPath(job.id, tab, location.search)} aria-current={tab === shown ? "page" : undefined}>
            {tabName(tab, job)}
            {tab === "incidents" && !!incidents && <span className="count">{incidents}</span>}
          </Link>
        ))}
      </nav>
      {brush && (
        <p className="brush-chip" role="status">
          <span>
            {clock(brush.since)} – {clock(brush.until)} <small>{fineDuration(brush.until - brush.since)}</small>
          </span>
          <button type="button" className="link" onClick={onClear}>
            Show all
          </button>
        </p>
      )}
    </div>
  );
}
