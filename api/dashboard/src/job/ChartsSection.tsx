/** The charts of the whole run, or of the brushed interval in more detail. */

import { useMemo, type ReactNode } from "react";

import type { IncidentView, JobView } from "../api/types";
import { Failure } from "../ui/notice";
import type { Window } from "./axis";
import { Charts } from "./Charts";
import type { Choices } from "./choices";
import { useDebounced } from "./hooks";
import { isProgram } from "./level";
import { Placeholder, Section, Toggle } from "./Section";
import { hasSeries, ofProgram } from "./series";
import { useMetricsOf } from "./useJobPage";

interface ChartsProps {
  job: JobView;
  /** Whether to load: false until the more urgent parts of the page are loaded. */
  wanted: boolean;
  brush: Window | null;
  choices: Choices;
  incidents: readonly IncidentView[];
  /** In the overview: a link to all charts, in place of all but the first ones. */
  brief?: ReactNode;
}

export function ChartsSection({ job, wanted, brush, choices, incidents, brief }: ChartsProps) {
  const metrics = useMetricsOf(job.id, useDebounced(brush, 120), wanted);
  const found = metrics.value;
  const program = isProgram(job);
  const shown = useMemo(() => (found && program ? ofProgram(found) : found), [found, program]);
  if (brief && program && shown && !hasSeries(shown)) return null; // the level says what to add
  return (
    <Section
      id="charts"
      name="Charts"
      note="All charts share a cursor; drag to select an interval."
      tools={brief ?? (
        <Toggle
          label="X axis"
          value={choices.axis}
          options={[["time", "Time"], ["step", "Steps"]] as const}
          onChange={(axis) => choices.set({ axis: axis === "time" ? null : axis })}
        />
      )}
    >
      {metrics.error && !metrics.value && (
        <Failure error={metrics.error} retry={() => void metrics.reload()} />
      )}
      {shown ? (
        <Charts
          metrics={shown}
          incidents={incidents}
          axis={choices.axis}
          window={brush}
          onBrush={choices.setBrush}
          brief={brief !== undefined}
        />
      ) : (
        !metrics.error && <Placeholder height={brief ? 200 : 380} />
      )}
    </Section>
  );
}
