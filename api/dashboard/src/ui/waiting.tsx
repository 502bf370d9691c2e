/** Beside the reason why a job waits: its place in the queue, and the job that nodes are reserved for. */

import { Link } from "wouter";
import type { WaitingView } from "../api/types";
import { count, plural } from "../format";

/** The resource of a job whose attempt starts: its verdict says for what it waits. */
export const START_WAIT = "start";

interface WaitReasonProps {
  id: string;
  waiting: WaitingView;
  /** Its place in the queue, if it is in the queue and the place is known. */
  place: number | undefined;
}

export function WaitReason({ id, waiting, place }: WaitReasonProps) {
  const { reserved } = waiting;
  const other = reserved && reserved.job !== id;
  if (place === undefined && !other) return null;
  return (
    <p className="wait notice warn">
      {place !== undefined && <b>{placeText(place)}</b>}
      {other && <Link to={`/jobs/${reserved.job}`}>Nodes are reserved for {reserved.name}</Link>}
    </p>
  );
}

/** "No. 2 in the queue". */
export const placeText = (place: number): string => `No. ${count(place)} in the queue`;

/** A tag for the job that nodes are reserved for; null for other jobs. */
export function ReservedTag({ id, waiting }: { id: string; waiting: WaitingView | null }) {
  const reserved = waiting?.reserved;
  if (!reserved || reserved.job !== id) return null;
  return (
    <span className="tag accent" title={`${plural(reserved.nodes, "node")}: no younger job starts on them`}>
      {count(reserved.nodes)} reserved
    </span>
  );
}
