/** The charts of the whole run, or of the stretch that is shown, then in more detail. */

import { Failure } from "../ui/notice";
import type { Window } from "./axis";
import { Charts } from "./Charts";
import type { Choices } from "./choices";
import { useLater } from "./hooks";
import { Ghost, Section, Toggle } from "./Section";
import { useMetricsOf } from "./useJobPage";
import type { Incident } from "./views";

interface ChartsProps {
  id: string;
  /** Whether what comes first has been read. */
  wanted: boolean;
  brush: Window | null;
  choices: Choices;
  incidents: readonly Incident[];
}

export function ChartsSection({ id, wanted, brush, choices, incidents }: ChartsProps) {
  const metrics = useMetricsOf(id, useLater(brush, 120), wanted);
  return (
    <Section
      id="charts"
      name="Charts"
      note="One cursor for all; drag to show a stretch."
      tools={
        <Toggle
          label="Along"
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
        !metrics.error && <Ghost height={380} />
      )}
    </Section>
  );
}
