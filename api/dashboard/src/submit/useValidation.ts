/** Asks the server, while somebody types, whether a text could be submitted. Nothing is created. */

import { useEffect, useRef, useState } from "react";
import { ApiError, send, type Body } from "../api/client";
import type { ProblemFault } from "../api/types";

export type Verdict =
  | { state: "unknown" }
  | { state: "checking" }
  | { state: "valid"; spec: Record<string, unknown> }
  | { state: "faulty"; faults: readonly ProblemFault[] }
  | { state: "unreadable"; why: string; line: number | null }
  | { state: "unasked"; why: string };

const PAUSE_MS = 250;

export function useValidation(text: string): Verdict {
  const [held, setHeld] = useState<Verdict>({ state: "unknown" });
  const first = useRef(true);
  useEffect(() => {
    const stop = new AbortController();
    const timer = setTimeout(() => {
      void judged(text, stop.signal).then((verdict) => {
        if (!stop.signal.aborted) setHeld(verdict);
      });
    }, first.current ? 0 : PAUSE_MS);
    first.current = false;
    return () => {
      clearTimeout(timer);
      stop.abort();
    };
  }, [text]);
  return held;
}

/** JSON is YAML too, but its own reader says better what is wrong with it. */
export const bodyOf = (text: string): Body => ({
  text, type: text.trimStart().startsWith("{") ? "application/json" : "application/yaml",
});

async function judged(text: string, signal: AbortSignal): Promise<Verdict> {
  if (text.trim() === "") return { state: "unknown" };
  try {
    const { spec } = await send<{ spec: Record<string, unknown> }>("POST", "/jobs/validate", { body: bodyOf(text), signal });
    return { state: "valid", spec };
  } catch (error) {
    return verdictOf(error);
  }
}

export function verdictOf(error: unknown): Verdict {
  if (!(error instanceof ApiError)) return { state: "unasked", why: (error as Error).message };
  if (error.faults.length > 0) return { state: "faulty", faults: error.faults };
  const line = /line (\d+)/.exec(error.message)?.[1];
  return { state: "unreadable", why: error.message, line: line === undefined ? null : Number(line) - 1 };
}
