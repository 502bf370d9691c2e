/** The faults that can be asked for, in words, and what each may be told. As
 * `holdfast_workers.fault_injection.kinds` has them; the server checks what is sent. */

import type { FaultKind } from "../api/types";

export interface KindOfFault {
  what: string;
  group: "The rank's process" | "The rank hangs or slows down" | "Numbers" | "The node" | "Around the job";
  takes: readonly Field[];
}

export type Field = "duration_s" | "factor" | "steps" | "where" | "target" | "bit" | "exit_code" | "outcome" | "xid";

const process = "The rank's process";
const hang = "The rank hangs or slows down";
const around = "Around the job";

export const FAULTS: Record<FaultKind, KindOfFault> = {
  kill: { group: process, what: "Killed with SIGKILL", takes: [] },
  segfault: { group: process, what: "Segmentation fault", takes: [] },
  abort: { group: process, what: "Aborted with SIGABRT", takes: [] },
  exit: { group: process, what: "Ends by itself", takes: ["exit_code"] },
  raise: { group: process, what: "Raises an exception", takes: [] },
  oom: { group: process, what: "Runs out of memory", takes: ["outcome"] },
  stop: { group: hang, what: "Stopped with SIGSTOP", takes: [] },
  gil: { group: hang, what: "Holds Python's lock in C", takes: ["duration_s"] },
  loop: { group: hang, what: "Runs in circles", takes: ["duration_s"] },
  collective: { group: hang, what: "Does not enter its next collective", takes: ["duration_s"] },
  read: { group: hang, what: "Reads what nobody writes", takes: ["duration_s"] },
  slow: { group: hang, what: "Computes several times as long", takes: ["factor", "steps"] },
  nan: { group: "Numbers", what: "Not a number in an output or gradient", takes: ["where", "target"] },
  bit_flip: { group: "Numbers", what: "One bit of a tensor flips", takes: ["where", "target", "bit"] },
  agent_death: { group: "The node", what: "Its node agent is killed, with its ranks", takes: [] },
  node_loss: { group: "The node", what: "It is gone with all its memory", takes: [] },
  partition: { group: "The node", what: "Cut off from the others", takes: ["duration_s"] },
  xid: { group: "The node", what: "Its accelerator reports an XID error", takes: ["xid"] },
  remote_down: { group: around, what: "The remote tier refuses every call", takes: ["duration_s"] },
  disk_full: { group: around, what: "The remote tier has no space", takes: ["duration_s"] },
  supervisor_death: { group: around, what: "The job's supervisor is killed", takes: [] },
};

export const GROUPS = [...new Set(Object.values(FAULTS).map((one) => one.group))];

export const FIELDS: Record<Field, { label: string; type: "number" | "text"; hint: string; step?: string }> = {
  duration_s: { label: "For how long, seconds", type: "number", hint: "for ever", step: "any" },
  factor: { label: "How many times as long", type: "number", hint: "2", step: "any" },
  steps: { label: "For how many steps", type: "number", hint: "to the end" },
  where: { label: "Where", type: "text", hint: "output or gradient; parameter or moment" },
  target: { label: "Module or parameter", type: "text", hint: "the first" },
  bit: { label: "Which bit", type: "number", hint: "chosen" },
  exit_code: { label: "Exit code", type: "number", hint: "1" },
  outcome: { label: "Outcome", type: "text", hint: "kill or error" },
  xid: { label: "XID", type: "number", hint: "79" },
};

/** Points of a rank's step at which a fault may be wanted. */
export const PHASES = [
  "forming", "rendezvous", "restore", "load", "forward", "backward", "agree", "optimizer", "checkpoint",
  "memory", "committed", "save", "saved",
] as const;

export const takesRank = (kind: FaultKind): boolean => FAULTS[kind].group !== around;
export const takesPhase = (kind: FaultKind): boolean =>
  takesRank(kind) && FAULTS[kind].group !== "The node" && kind !== "nan" && kind !== "bit_flip" && kind !== "slow";
