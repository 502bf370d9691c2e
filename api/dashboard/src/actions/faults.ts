/** The injectable faults, as `holdfast_workers.fault_injection.kinds` declares them; the server
 * validates the request. */

import declared from "../api/faults.json";
import type { FaultKind } from "../api/types";

export interface FaultParameter {
  name: string;
  label: string;
  default: string | number | null;
  /** What the absence means, if there is no default. */
  unset: string;
  /** Of a number; null: a word. */
  limits: readonly number[] | null;
  words: readonly string[];
}

export const FAULTS: Record<FaultKind, { label: string; group: string; parameters: readonly FaultParameter[] }> = declared;
export const KINDS = Object.keys(FAULTS) as FaultKind[];
export const GROUPS = [...new Set(Object.values(FAULTS).map((fault) => fault.group))];

/** The values that the chosen kind can have too: a word of another kind could not be seen. */
export function keptValues(chosen: FaultKind, values: Record<string, string>): Record<string, string> {
  const words = new Map(FAULTS[chosen].parameters.map((parameter) => [parameter.name, parameter.words]));
  return Object.fromEntries(
    Object.entries(values).filter(([name, value]) => !words.get(name)?.length || words.get(name)!.includes(value)),
  );
}

/** The request body of the fault; empty fields are omitted. */
export function faultDocument(kind: FaultKind, values: Record<string, string>): Record<string, unknown> {
  const given = FAULTS[kind].parameters.filter(({ name }) => (values[name] ?? "") !== "");
  return { kind, ...Object.fromEntries(given.map(({ name, limits }) => [name, limits ? Number(values[name]) : values[name]])) };
}
