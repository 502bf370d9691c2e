/** The charts of the whole run, or of the brushed interval in more detail. */

import type { IncidentView } from "../api/types";
import { Failure } from "../ui/notice";
import type { Window } from "./axis";
import { Charts } from "./Charts";
import type { Choices } from "./choices";
import { useDebounced } from "./hooks";
import { Placeholder, Section, Toggle } from "./Section";
import { useMetricsOf } from "./useJobPage";

interface ChartsProps {
  id: string;
  /** Whether to load: false until the more urgent parts of the page are loaded. */
  wanted: boolean;
  brush: Window | null;
  choices: Choices;
  incidents: readonly IncidentView[];
}

export function ChartsSection({ id, wanted, brush, choices, incidents }: ChartsProps) {
  const metrics = useMetricsOf(id, useDebounced(brush, 120), wanted);
  return (
    <Section
      id="charts"
      name="Charts"
      note="All charts share a cursor; drag to select an interval."
      tools={
        <Toggle
          label="X axis"
          value={choices.axis}
          options={[["time", "Time"], ["step", "Steps"]] as const}
          onChange={(axis) => choices.set({ axis: axis === "time" ? null : axis })}
        />
      }
    >
      {metrics.error && !metrics.value && (
        <Failure error={metrics.error} retry={() => void metrics.reload()} />
      )}
      {metrics.value ? (
        <Charts
          metrics={metrics.value}
          incidents={incidents}
          axis={choices.axis}
          window={brush}
          onBrush={choices.setBrush}
        />
      ) : (
        !metrics.error && <Placeholder height={380} />
      )}
    </Section>
  );
}
