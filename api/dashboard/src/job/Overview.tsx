/** The overview of a job below its verdict and its time: what is worth seeing first. A user's program
 * shows its output and what it could report; every job shows its first charts and newest incidents. */

import { Link } from "wouter";

import type { IncidentView, JobView } from "../api/types";
import type { Window } from "./axis";
import { ChartsSection } from "./ChartsSection";
import type { Choices } from "./choices";
import { IncidentCards } from "./incidents/IncidentCards";
import { isProgram } from "./level";
import { LevelCard } from "./LevelCard";
import { OutputEnd } from "./logs/OutputEnd";
import { Section } from "./Section";
import { Sources } from "./Sources";
import { tabName, tabPath, type Tab } from "./tabs";

interface OverviewProps {
  job: JobView;
  brush: Window | null;
  choices: Choices;
  live: boolean;
  /** Whether to load: false until the verdict and the time are loaded. */
  wanted: boolean;
  incidents: readonly IncidentView[] | undefined;
  openRank: (rank: number) => void;
}

const NEWEST = 3;
const NONE: readonly IncidentView[] = [];

export function Overview({ job, brush, choices, live, wanted, incidents = NONE, openRank }: OverviewProps) {
  return (
    <>
      <LevelCard job={job} />
      {isProgram(job) && wanted && <OutputEnd job={job} live={live} more={<More job={job} tab="logs" />} />}
      <Sources job={job} />
      <ChartsSection {...{ job, wanted, brush, choices, incidents }} brief={<More job={job} tab="charts" />} />
      {incidents.length > 0 && (
        <Section id="incidents" name="Newest incidents" tools={<More job={job} tab="incidents" />}>
          <IncidentCards incidents={incidents} window={brush} chosen={null} onRank={openRank} newest={NEWEST} />
        </Section>
      )}
    </>
  );
}

/** A link to the tab that has all of it. */
const More = ({ job, tab }: { job: JobView; tab: Tab }) => (
  <Link to={tabPath(job.id, tab, location.search)} className="small">
    All: {tabName(tab, job)} →
  </Link>
);
