/** All incidents of the job, or those in the selected interval. */

import type { IncidentView } from "../../api/types";
import type { Resource } from "../../data";
import { Failure } from "../../ui/notice";
import type { Window } from "../axis";
import { Placeholder, Section } from "../Section";
import { IncidentCards, incidentsWithin } from "./IncidentCards";

interface IncidentsProps {
  found: Resource<IncidentView[]>;
  window: Window | null;
  chosen: number | null;
  onRank: (rank: number) => void;
}

export function IncidentsSection({ found, window, chosen, onRank }: IncidentsProps) {
  const { value } = found;
  return (
    <Section id="incidents" name="Incidents" count={value ? incidentsWithin(value, window) : undefined}>
      {found.error && !value && <Failure error={found.error} retry={() => void found.reload()} />}
      {value ? <IncidentCards incidents={value} window={window} chosen={chosen} onRank={onRank} /> : <Placeholder height={80} />}
    </Section>
  );
}
