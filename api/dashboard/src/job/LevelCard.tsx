/** How much a user's program works with Holdfast, what that gives, and what is worth adding next. */

import type { JobView } from "../api/types";
import { isProgram, levelName } from "./level";

export function LevelCard({ job }: { job: JobView }) {
  if (!isProgram(job)) return null;
  const { level, next_level: next } = job;
  const known = level !== null && level !== undefined;
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
