/** The ranks of a job: what each of their processes does, how they compare over time, and the drawer of
 * the selected one. */

import { useCallback } from "react";

import type { JobView } from "../api/types";
import { useLast } from "../data";
import { Failure } from "../ui/notice";
import type { Window } from "./axis";
import type { Choices } from "./choices";
import { Heatmap, LABELS } from "./heatmap/Heatmap";
import { useDebounced } from "./hooks";
import { isProgram } from "./level";
import { Processes } from "./Processes";
import { RankDrawer } from "./RankDrawer";
import { Placeholder, Section, Toggle } from "./Section";
import { useHistoryOf, useRanksOf } from "./useJobPage";
import { hasValues } from "./views";

interface RanksProps {
  job: JobView;
  brush: Window | null;
  /** Whether to load: false until the interval in the URL is known to be within the run. */
  wanted: boolean;
  choices: Choices;
  live: boolean;
  openRank: (rank: number) => void;
  onIncident: (number: number) => void;
}

const QUANTITIES = [
  ["compute_s", "Compute"],
  ["step_s", "Step"],
  ["lag", "Lag"],
] as const;
const ORDERS = [
  ["stragglers", "Slowest first"],
  ["rank", "By rank"],
] as const;

export function RanksSection({ job, brush, wanted, choices, live, openRank, onIncident }: RanksProps) {
  const shownBrush = useDebounced(brush, 120);
  const history = useHistoryOf(job.id, choices.of, shownBrush, wanted, live);
  const shown = useLast(history.value);
  const close = useCallback(() => choices.set({ rank: null }), [choices]);
  const program = isProgram(job);
  const measured = shown !== undefined && hasValues(shown);
  const ranks = useRanksOf(job.id, program || (shown !== undefined && !measured) || choices.rank !== null);
  const started = ranks.value !== undefined && ranks.value.ranks.length > 0;
  return (
    <>
      {ranks.error && !ranks.value && <Failure error={ranks.error} retry={() => void ranks.reload()} />}
      {ranks.value && (program || (!measured && started)) && (
        <Section id="processes" name="Processes" note={`Attempt ${ranks.value.attempt}`} count={ranks.value.ranks.length}>
          <Processes ranks={ranks.value} live={live} onOpen={openRank} />
        </Section>
      )}
      {(measured || (!program && (!started || brush))) && <Section
        id="ranks"
        name={program ? "Steps over time" : "Ranks"}
        note={`${LABELS[choices.of]}, by node`}
        tools={
          <>
            <Toggle
              label="Quantity"
              value={choices.of}
              options={QUANTITIES}
              onChange={(of) => choices.set({ of: of === "compute_s" ? null : of })}
            />
            <Toggle
              label="Order"
              value={choices.order}
              options={ORDERS}
              onChange={(order) => choices.set({ order: order === "stragglers" ? null : order })}
            />
          </>
        }
      >
        {history.error && !shown && <Failure error={history.error} retry={() => void history.reload()} />}
        {measured ? (
          <Heatmap history={shown} of={choices.of} order={choices.order} onOpen={openRank} />
        ) : shown ? (
          <p className="nothing">No rank has completed a step in this interval.</p>
        ) : (
          !history.error && <Placeholder height={430} />
        )}
      </Section>}
      {choices.rank !== null && (
        <RankDrawer
          jobId={job.id}
          rank={choices.rank}
          now={ranks.value?.ranks.find((rank) => rank.rank === choices.rank)}
          history={measured ? shown : undefined}
          window={brush}
          live={live}
          onClose={close}
          onRank={openRank}
          onIncident={onIncident}
        />
      )}
    </>
  );
}
