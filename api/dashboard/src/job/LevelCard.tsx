/** How much a user's program works with Holdfast, what that gives, and what is worth adding next. */

import type { JobView, State } from "../api/types";
import { isProgram, levelName } from "./level";

const BEFORE: ReadonlySet<State> = new Set<State>(["QUEUED", "STARTING"]);

export function LevelCard({ job }: { job: JobView }) {
  if (!isProgram(job)) return null;
  const { level, next_level: next } = job;
  // Before the program has started, the level is that of one that reports nothing.
  const known = level != null && (level > 0 || job.progress.attempt > 1 || !BEFORE.has(job.state));
  return (
    <section className="level card" aria-labelledby="level-name">
      <div>
        <h2 id="level-name">{known ? levelName(level, job.integration) : "The program has not started yet"}</h2>
        <p className="level-line">
          <code>{[job.spec[job.brings] ?? ""].flat().join(" ")}</code>
        </p>
        {job.gives && <p className="second">{job.gives}</p>}
      </div>
      {next && (
        <details>
          <summary>
            Worth adding: {next.lines.split("\n").length === 1 ? "one line" : "a few lines"}
          </summary>
          <p className="second">{next.gives}</p>
          <pre tabIndex={0} aria-label="Lines to add">{next.lines}</pre>
        </details>
      )}
    </section>
  );
}
