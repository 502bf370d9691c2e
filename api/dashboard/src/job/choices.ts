/** The choices of the user on the job page, as stored in its URL. */

import { useCallback, useMemo } from "react";

import { isTime } from "../api/times";
import type { RankMeasure } from "../api/types";
import { useFilters } from "../routing/router";
import type { Window } from "./axis";
import type { Order } from "./heatmap/heat";
import type { LogChoice } from "./logs/Logs";
import type { XAxis } from "./series";

export interface Choices {
  brush: Window | null;
  setBrush: (brush: Window | null) => void;
  incident: number | null;
  rank: number | null;
  against: string;
  of: RankMeasure;
  order: Order;
  axis: XAxis;
  log: LogChoice;
  set: (changes: Record<string, string | null>) => void;
}

export function useChoices(): Choices {
  const [params, set] = useFilters();
  const text = params.toString();
  const setBrush = useCallback(
    (brush: Window | null) =>
      set({ from: brush ? brush.since.toFixed(2) : null, to: brush ? brush.until.toFixed(2) : null }),
    [set],
  );
  return useMemo(() => {
    const now = new URLSearchParams(text);
    const number = (name: string) => {
      const value = now.get(name);
      return value !== null && value !== "" && Number.isFinite(Number(value)) ? Number(value) : null;
    };
    const time = (name: string) => {
      const value = number(name);
      return value !== null && isTime(value) ? value : null;
    };
    const [since, until] = [time("from"), time("to")];
    const of = now.get("of");
    return {
      brush: since !== null && until !== null ? { since, until } : null,
      setBrush,
      incident: number("incident"),
      rank: number("rank"),
      against: now.get("against") ?? "",
      of: of === "step_s" || of === "lag" ? of : "compute_s",
      order: now.get("order") === "rank" ? "rank" : "stragglers",
      axis: now.get("axis") === "step" ? "step" : "time",
      log: {
        rank: number("log_rank"),
        attempt: number("log_attempt"),
        level: now.get("level"),
        grep: now.get("grep") ?? "",
      },
      set,
    };
  }, [text, set, setBrush]);
}
