/** The heatmap with its options, and the drawer of the selected rank. */

import { useCallback } from "react";

import type { JobView } from "../api/types";
import { useLast, type Resource } from "../data";
import { Failure } from "../ui/notice";
import type { Window } from "./axis";
import type { Choices } from "./choices";
import { Heatmap, LABELS } from "./heatmap/Heatmap";
import { RankDrawer } from "./RankDrawer";
import { Placeholder, Section, Toggle } from "./Section";
import { useRanksOf } from "./useJobPage";
import type { RankHistory } from "./views";

interface RanksProps {
  job: JobView;
  history: Resource<RankHistory>;
  brush: Window | null;
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

export function RanksSection({ job, history, brush, choices, live, openRank, onIncident }: RanksProps) {
  const ranks = useRanksOf(job.id, choices.rank !== null);
  const shown = useLast(history.value);
  const close = useCallback(() => choices.set({ rank: null }), [choices]);
  return (
    <Section
      id="ranks"
      name="Ranks"
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
      <div>
        {history.error && !shown && <Failure error={history.error} retry={() => void history.reload()} />}
        {shown && shown.ranks.length > 0 && shown.buckets > 0 ? (
          <Heatmap history={shown} of={choices.of} order={choices.order} onOpen={openRank} />
        ) : shown ? (
          <p className="nothing">No rank has completed a step in this interval.</p>
        ) : (
          !history.error && <Placeholder height={430} />
        )}
      </div>
      {choices.rank !== null && (
        <RankDrawer
          jobId={job.id}
          rank={choices.rank}
          now={ranks.value?.ranks.find((rank) => rank.rank === choices.rank)}
          history={shown}
          window={brush}
          live={live}
          onClose={close}
          onRank={openRank}
          onIncident={onIncident}
        />
      )}
    </Section>
  );
}
