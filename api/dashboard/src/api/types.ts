/** The types of the API from the generated schema, and its states. */

import type { State } from "./schema";

export type * from "./schema";

export const STATES: readonly State[] = [
  "QUEUED", "STARTING", "RUNNING", "RECOVERING", "RESIZING", "PAUSING", "PAUSED",
  "CANCELLING", "CANCELLED", "SUCCEEDED", "FAILED",
];
const ENDED: ReadonlySet<State> = new Set<State>(["CANCELLED", "SUCCEEDED", "FAILED"]);
export const ended = (state: State): boolean => ENDED.has(state);
