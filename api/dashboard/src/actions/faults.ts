/** The injectable faults with their labels and fields, equal to
 * `holdfast_workers.fault_injection.kinds`; the server validates the request. */

import type { FaultKind } from "../api/types";

export interface FaultDescription {
  label: string;
  group: "The rank's process" | "The rank hangs or slows down" | "Numbers" | "The node" | "Around the job";
  fields: readonly Field[];
}

export type Field = "duration_s" | "factor" | "steps" | "where" | "target" | "bit" | "exit_code" | "outcome" | "xid";

const process = "The rank's process";
const hang = "The rank hangs or slows down";
const around = "Around the job";

export const FAULTS: Record<FaultKind, FaultDescription> = {
  kill: { group: process, label: "Killed with SIGKILL", fields: [] },
  segfault: { group: process, label: "Segmentation fault", fields: [] },
  abort: { group: process, label: "Aborted with SIGABRT", fields: [] },
  exit: { group: process, label: "Ends by itself", fields: ["exit_code"] },
  raise: { group: process, label: "Raises an exception", fields: [] },
  oom: { group: process, label: "Runs out of memory", fields: ["outcome"] },
  stop: { group: hang, label: "Stopped with SIGSTOP", fields: [] },
  gil: { group: hang, label: "Holds Python's GIL in C", fields: ["duration_s"] },
  loop: { group: hang, label: "Loops forever", fields: ["duration_s"] },
  collective: { group: hang, label: "Does not enter its next collective", fields: ["duration_s"] },
  read: { group: hang, label: "Blocks in a read", fields: ["duration_s"] },
  slow: { group: hang, label: "Computes several times slower", fields: ["factor", "steps"] },
  nan: { group: "Numbers", label: "NaN in an output or gradient", fields: ["where", "target"] },
  bit_flip: { group: "Numbers", label: "A bit of a tensor flips", fields: ["where", "target", "bit"] },
  agent_death: { group: "The node", label: "The node agent is killed with its ranks", fields: [] },
  node_loss: { group: "The node", label: "The node is lost with all its memory", fields: [] },
  partition: { group: "The node", label: "Network partition", fields: ["duration_s"] },
  reset: { group: "The node", label: "Its connections are reset", fields: [] },
  xid: { group: "The node", label: "The accelerator reports an XID error", fields: ["xid"] },
  remote_down: { group: around, label: "The remote tier refuses every call", fields: ["duration_s"] },
  disk_full: { group: around, label: "The remote tier has no space", fields: ["duration_s"] },
  supervisor_death: { group: around, label: "The job's supervisor is killed", fields: [] },
};

export const GROUPS = [...new Set(Object.values(FAULTS).map((fault) => fault.group))];

export const FIELDS: Record<Field, { label: string; type: "number" | "text"; hint: string; step?: string }> = {
  duration_s: { label: "Duration, seconds", type: "number", hint: "unlimited", step: "any" },
  factor: { label: "Slowdown factor", type: "number", hint: "2", step: "any" },
  steps: { label: "Number of steps", type: "number", hint: "to the end" },
  where: { label: "Where", type: "text", hint: "output or gradient; parameter or moment" },
  target: { label: "Module or parameter", type: "text", hint: "the first" },
  bit: { label: "Bit", type: "number", hint: "random" },
  exit_code: { label: "Exit code", type: "number", hint: "1" },
  outcome: { label: "Outcome", type: "text", hint: "kill or error" },
  xid: { label: "XID", type: "number", hint: "79" },
};

/** The phases of a rank at which a fault can be injected. */
export const PHASES = [
  "forming", "rendezvous", "restore", "load", "forward", "backward", "agree", "optimizer", "checkpoint",
  "memory", "committed", "save", "saved",
] as const;

export const takesRank = (kind: FaultKind): boolean => FAULTS[kind].group !== around;
export const takesPhase = (kind: FaultKind): boolean =>
  takesRank(kind) && FAULTS[kind].group !== "The node" && kind !== "nan" && kind !== "bit_flip" && kind !== "slow";
