/**
 * The time that the pointer is at, shared by the ribbon, the heatmap and the charts. It changes with
 * every movement of the mouse, so it bypasses React: each listener paints by itself.
 */

import { createContext, useContext } from "react";

export interface Cursor {
  at: number | null;
  set(at: number | null, from?: unknown): void;
  /** `from`: the component that set the time, so that it can ignore its own changes. */
  listen(listener: (at: number | null, from: unknown) => void): () => void;
}

export function newCursor(): Cursor {
  const listeners = new Set<(at: number | null, from: unknown) => void>();
  return {
    at: null,
    set(at, from) {
      if (at === this.at) return;
      this.at = at;
      for (const listener of listeners) listener(at, from);
    },
    listen(listener) {
      listeners.add(listener);
      return () => void listeners.delete(listener);
    },
  };
}

const CursorContext = createContext<Cursor>(newCursor());
export const CursorProvider = CursorContext.Provider;
export const useCursor = (): Cursor => useContext(CursorContext);
