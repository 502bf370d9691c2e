/** The log section of the page; its filters are in the URL. */

import { useCallback } from "react";

import type { JobView } from "../../api/types";
import type { Window } from "../axis";
import type { Choices } from "../choices";
import { Logs, type LogChoice } from "./Logs";
import { Section } from "../Section";
import { tabName } from "../tabs";
import { useAttemptNumbers } from "../useJobPage";

export function LogSection({ job, brush, choices, live }: { job: JobView; brush: Window | null; choices: Choices; live: boolean }) {
  const attempts = useAttemptNumbers(job.progress.attempt);
  const choose = useCallback(
    (log: LogChoice) =>
      choices.set({
        log_rank: log.rank === null ? null : String(log.rank),
        log_attempt: log.attempt === null ? null : String(log.attempt),
        level: log.level,
        grep: log.grep || null,
      }),
    [choices],
  );
  return (
    <Section id="logs" name={tabName("logs", job)}>
        <Logs
          jobId={job.id}
          window={brush}
          choice={choices.log}
          onChoice={choose}
          attempts={attempts}
          live={live}
        />
    </Section>
  );
}
