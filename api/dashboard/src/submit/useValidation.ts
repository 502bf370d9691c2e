/** Validates the text on the server while the user types. Creates nothing. */

import { useEffect, useRef, useState } from "react";
import { ApiError, send, type Body } from "../api/client";
import type { ProblemFault } from "../api/types";

export type Validation =
  | { state: "unknown" }
  | { state: "checking" }
  | { state: "valid"; spec: Record<string, unknown> }
  | { state: "faulty"; faults: readonly ProblemFault[] }
  | { state: "unreadable"; why: string; line: number | null }
  | { state: "unchecked"; why: string };

const PAUSE_MS = 250;

export function useValidation(text: string): Validation {
  const [held, setHeld] = useState<Validation>({ state: "unknown" });
  const first = useRef(true);
  useEffect(() => {
    const stop = new AbortController();
    const timer = setTimeout(() => {
      void validate(text, stop.signal).then((verdict) => {
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

/** JSON is sent as such: YAML reads its numbers otherwise (`1e-5`). Anything else is YAML. */
export const bodyOf = (text: string): Body => ({
  text, type: isJson(text) ? "application/json" : "application/yaml",
});

function isJson(text: string): boolean {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

async function validate(text: string, signal: AbortSignal): Promise<Validation> {
  if (text.trim() === "") return { state: "unknown" };
  try {
    const { spec } = await send<{ spec: Record<string, unknown> }>("POST", "/jobs/validate", { body: bodyOf(text), signal });
    return { state: "valid", spec };
  } catch (error) {
    return verdictOf(error);
  }
}

export function verdictOf(error: unknown): Validation {
  if (!(error instanceof ApiError)) return { state: "unchecked", why: (error as Error).message };
  if (error.faults.length > 0) return { state: "faulty", faults: error.faults };
  const line = /line (\d+)/.exec(error.message)?.[1];
  return { state: "unreadable", why: error.message, line: line === undefined ? null : Number(line) - 1 };
}
