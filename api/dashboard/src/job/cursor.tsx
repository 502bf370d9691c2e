/**
 * The moment that the reader points at, the same in the ribbon, the heatmap and every chart. It
 * moves with each movement of the mouse, so it goes past React: who shows it paints by itself.
 */

import { createContext, useContext } from "react";

export interface Cursor {
  at: number | null;
  set(at: number | null, from?: unknown): void;
  /** `from`: who set it, so that it need not hear itself. */
  listen(heard: (at: number | null, from: unknown) => void): () => void;
}

export function newCursor(): Cursor {
  const listeners = new Set<(at: number | null, from: unknown) => void>();
  return {
    at: null,
    set(at, from) {
      if (at === this.at) return;
      this.at = at;
      for (const heard of listeners) heard(at, from);
    },
    listen(heard) {
      listeners.add(heard);
      return () => void listeners.delete(heard);
    },
  };
}

const Context = createContext<Cursor>(newCursor());
export const CursorProvider = Context.Provider;
export const useCursor = (): Cursor => useContext(Context);
