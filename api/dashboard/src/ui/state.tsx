/** A job's state as a shape, a colour and a name. */

import type { State } from "../api/types";

const SHAPES: Record<State, { path: string; filled?: boolean; moves?: "spin" | "breathe" }> = {
  QUEUED: { path: "M7 2a5 5 0 1 0 0 10A5 5 0 0 0 7 2zM7 4.5V7l1.6 1.2" },
  STARTING: { path: "M7 2a5 5 0 1 1-5 5", moves: "spin" },
  RUNNING: { path: "M7 3.2a3.8 3.8 0 1 0 0 7.6 3.8 3.8 0 0 0 0-7.6z", filled: true, moves: "breathe" },
  RECOVERING: { path: "M11.5 5.2A5 5 0 1 0 12 7M12 2.6v2.8H9.2", moves: "spin" },
  RESIZING: { path: "M2.5 11.5l9-9M8 2.5h3.5V6M6 11.5H2.5V8" },
  PAUSING: { path: "M5 3v8M9 3v8", moves: "breathe" },
  PAUSED: { path: "M5 3v8M9 3v8" },
  CANCELLING: { path: "M4 4l6 6M10 4l-6 6", moves: "breathe" },
  CANCELLED: { path: "M7 2a5 5 0 1 0 0 10A5 5 0 0 0 7 2zM4.5 7h5" },
  SUCCEEDED: { path: "M2.8 7.4l2.8 2.8 5.6-6.2" },
  FAILED: { path: "M3.5 3.5l7 7M10.5 3.5l-7 7" },
};

export const stateName = (state: State): string => state.charAt(0) + state.slice(1).toLowerCase();
export const tone = (state: State): string => `is-${state.toLowerCase()}`;

export function StateIcon({ state }: { state: State }) {
  const { path, filled, moves } = SHAPES[state];
  return (
    <svg width="14" height="14" viewBox="0 0 14 14" aria-hidden="true" className={moves}
      fill={filled ? "currentColor" : "none"} stroke="currentColor" strokeWidth={filled ? 0 : 1.7}
      strokeLinecap="round" strokeLinejoin="round">
      <path d={path} />
    </svg>
  );
}

export function StateLabel({ state, chip = false }: { state: State; chip?: boolean }) {
  return (
    <span className={`state ${tone(state)}${chip ? " chip" : ""}`}>
      <StateIcon state={state} />
      {stateName(state)}
    </span>
  );
}
