/** The API's values by their names, from the generated schema; and, until the server describes
 * them, those of the contract that are still to come. */

import type { components } from "./schema";

type Schemas = components["schemas"];

export type JobView = Schemas["JobView"];
export type State = Schemas["State"];
export type Desired = Schemas["Desired"];
export type AttemptView = Schemas["AttemptView"];
export type MemberView = Schemas["MemberView"];
export type IncidentView = Schemas["IncidentView"];
export type EventView = Schemas["EventView"];
export type EventPage = Schemas["EventPage"];
export type MetricPoint = Schemas["MetricPoint"];
export type MetricPage = Schemas["MetricPage"];
export type LogLineView = Schemas["LogLineView"];
export type LogPage = Schemas["LogPage"];
export type GoodputView = Schemas["GoodputView"];
export type NodeView = Schemas["NodeView"];
export type NodePage = Schemas["NodePage"];
export type NodeFindingView = Schemas["NodeFindingView"];
export type CheckpointView = Schemas["CheckpointView"];
export type CheckpointsView = Schemas["CheckpointsView"];
export type VerificationView = Schemas["VerificationView"];
export type FaultView = Schemas["FaultView"];
export type FaultKind = Schemas["FaultKind"];
export type Injection = Schemas["Injection"];
export type Problem = Schemas["Problem"];
export type ProblemFault = Schemas["ProblemFault"];

export const STATES: readonly State[] = [
  "QUEUED", "STARTING", "RUNNING", "RECOVERING", "RESIZING", "PAUSING", "PAUSED",
  "CANCELLING", "CANCELLED", "SUCCEEDED", "FAILED",
];
const ENDED: ReadonlySet<State> = new Set<State>(["CANCELLED", "SUCCEEDED", "FAILED"]);
export const ended = (state: State): boolean => ENDED.has(state);

export interface JobRow {
  id: string;
  name: string;
  owner: string | null;
  state: State;
  desired: Desired;
  step: number;
  steps: number;
  attempt: number;
  incidents: number;
  loss: number | null;
  tokens_per_second: number | null;
  goodput: number | null;
  eta_s: number | null;
  waiting: { resource: string; reason: string } | null;
  outcome_code: string | null;
  created_at: number;
  started_at: number | null;
  ended_at: number | null;
  event_seq: number;
}

export interface JobRowPage {
  rows: JobRow[];
  next_cursor: string | null;
  total: number;
  counts: Partial<Record<State, number>>;
}

export interface VerdictView {
  headline: string;
  doing: string;
  last: string | null;
  next: string | null;
  eta_s: number | null;
  goodput: number | null;
  device_hours_used: number | null;
  device_hours_lost: number | null;
  fresh_at: number;
}

export type SpanKind =
  | "waiting" | "starting" | "productive" | "detecting" | "recovering" | "restoring" | "replaying" | "finishing" | "stopped";

export interface TimelineView {
  since: number;
  until: number;
  spans: { kind: SpanKind; attempt: number | null; since: number; until: number; incident: number | null }[];
  incidents: { number: number; at: number; closed_at: number | null; cause: string; decision: string | null }[];
  checkpoints: { step: number; at: number; tier: string }[];
}

export interface RankView {
  rank: number;
  node: string;
  host: string;
  agent: string;
  worker: string;
  role: string;
  step: number;
  phase: string;
  lag_steps: number;
  step_time_s: number | null;
  slow_factor: number | null;
  silent_s: number | null;
  coordinates: Record<string, number>;
}

export interface RanksView {
  at: number;
  attempt: number;
  front_step: number;
  ranks: RankView[];
}

export interface RankHistoryView {
  since: number;
  until: number;
  bucket_s: number;
  ranks: { rank: number; node: string; workers: string[] }[];
  values: (number | null)[][];
}

export interface QueuedJobView {
  job: string;
  name: string;
  since: number;
  waiting: { resource: string; reason: string } | null;
}

export interface ClusterView {
  nodes: NodeView[];
  queue: QueuedJobView[];
  queued: number;
  capacity: {
    nodes: number;
    cpus: number;
    gpus: number;
    free_nodes: number;
    free_cpus: number;
    free_gpus: number;
  };
  fault_injection: boolean;
}

export interface SpecDifferenceView {
  path: string;
  left: unknown;
  right: unknown;
}
