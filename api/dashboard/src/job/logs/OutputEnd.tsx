/** The last lines that the program has written, followed live. */

import type { ReactNode } from "react";

import type { JobView } from "../../api/types";
import { Section } from "../Section";
import { NO_FILTER } from "./logBuffer";
import { LogRow } from "./Logs";
import { useLogs } from "./useLogs";

const LINES = 10;

export function OutputEnd({ job, live, more }: { job: JobView; live: boolean; more: ReactNode }) {
  const { buffer, loading, error } = useLogs(job.id, NO_FILTER, false);
  const last = buffer.lines.slice(-LINES);
  return (
    <Section id="output" name="Output" note={live ? "The last lines, as they come." : "The last lines."} tools={more}>
      {error && <p className="notice bad" role="alert">{error}</p>}
      {last.length > 0 ? (
        <div className="output-end" tabIndex={0} role="region" aria-label="The last lines of the output">
          {last.map((line) => (
            <LogRow key={line.line} line={line} grep="" ofRank={false} />
          ))}
        </div>
      ) : (
        !error && <p className="nothing">{loading ? "Loading …" : live ? "The program has written nothing yet." : "The program has written nothing."}</p>
      )}
    </Section>
  );
}
