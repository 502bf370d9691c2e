/** What the job page reads of the REST API, and nothing else of it. Times are Unix seconds. */

export type State =
  | "QUEUED"
  | "STARTING"
  | "RUNNING"
  | "RECOVERING"
  | "RESIZING"
  | "PAUSING"
  | "PAUSED"
  | "CANCELLING"
  | "CANCELLED"
  | "SUCCEEDED"
  | "FAILED";

export interface Progress {
  step: number;
  steps: number;
  attempt: number;
  loss: number | null;
  tokens_per_second: number | null;
  incidents: number;
}

export interface Straggler {
  rank: number;
  agent: string;
  node: string;
  factor: number;
  since_step: number;
  since: number;
}

export interface Job {
  id: string;
  name: string;
  state: State;
  desired: string;
  spec: Record<string, unknown>;
  progress: Progress;
  stragglers?: Straggler[];
  outcome: { code: string; message: string; traceback: string | null } | null;
  waiting: { resource: string; reason: string; since: number; until: number | null } | null;
  created_at: number;
  started_at: number | null;
  ended_at: number | null;
  event_seq: number;
}

export interface Verdict {
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
  | "waiting"
  | "starting"
  | "productive"
  | "detecting"
  | "recovering"
  | "restoring"
  | "replaying"
  | "finishing"
  | "stopped";

export interface Span {
  kind: SpanKind;
  attempt: number | null;
  since: number;
  until: number;
  incident: number | null;
}

export interface Timeline {
  since: number;
  until: number;
  spans: Span[];
  incidents: {
    number: number;
    at: number;
    closed_at: number | null;
    cause: string;
    decision: string | null;
  }[];
  checkpoints: { step: number; at: number; tier: string }[];
}

export interface RankNow {
  rank: number;
  node: string;
  host: string;
  agent: string;
  worker: string;
  role: string;
  step: number | null;
  phase: string | null;
  lag_steps: number | null;
  step_time_s: number | null;
  slow_factor: number | null;
  silent_s: number | null;
  coordinates: Record<string, number>;
}

export interface Ranks {
  at: number | null;
  attempt: number;
  front_step: number | null;
  ranks: RankNow[];
}

export type HeatQuantity = "compute_s" | "step_s" | "lag";

export interface RankHistory {
  since: number;
  until: number;
  bucket_s: number;
  ranks: { rank: number; node: string; workers: string[] }[];
  values: (number | null)[][];
}

export interface RankDetail {
  rank: number;
  now: RankNow | null;
  workers: {
    attempt: number;
    worker: string;
    agent: string;
    node: string;
    host: string;
    pid: number | null;
    since: number;
    until: number | null;
  }[];
  stacks: { incident: number; at: number; frames: string[]; detail: Record<string, unknown> }[];
  incidents: number[];
  memory_bytes: number | null;
}

export interface MetricPoint {
  step: number;
  attempt: number;
  at: number;
  values: Record<string, number | string | null>;
}

export interface Metrics {
  names: string[];
  points: MetricPoint[];
  discarded?: { attempt: number; points: MetricPoint[] }[];
  last_step: number;
  more: boolean;
}

export interface Suspect {
  rank?: number;
  score?: number;
  reasons?: string[];
  agent?: string;
  node_id?: string;
  worker?: string;
}

export interface Stack {
  ranks?: number[];
  frames?: string[];
}

export interface Incident {
  number: number;
  cause: string;
  causes: string[];
  attempt: number;
  lost: unknown[];
  evidence: unknown[];
  suspects: Suspect[];
  stacks: Stack[];
  decision: string | null;
  reason: string | null;
  refused: { decision: string; why: string }[];
  budget: {
    failures: number;
    max_failures: number;
    failures_left: number;
    preemptions: number;
    max_preemptions: number;
    without_progress: number;
    max_without_progress: number;
    window_s: number;
  } | null;
  attempts_lost: number;
  restored_step: number | null;
  steps_lost: number | null;
  device_seconds_lost: number;
  tiers: Record<string, string>;
  phases_s: Record<string, number | null>;
  signalled_at: number | null;
  opened_at: number;
  closed_at: number | null;
  resolution: string | null;
}

export interface Attempt {
  number: number;
  state: string;
  mesh: Record<string, number>;
  world_size: number;
  cause_incident: number | null;
  first_step: number | null;
  last_step: number | null;
  forming_at: number;
  running_at: number | null;
  ended_at: number | null;
  reason: string | null;
}

export interface JobEvent {
  seq: number;
  at: number;
  kind: string;
  data: Record<string, unknown>;
}

export interface LogLine {
  line: number;
  at: number;
  rank: number | null;
  attempt: number;
  agent: string;
  worker: string;
  stream: string;
  text: string;
  level?: string | null;
}

export interface LogPage {
  lines: LogLine[];
  last_line: number;
  more: boolean;
  /** Backwards: where to go on; null: there is nothing before. */
  first_line: number | null;
}

export interface SpecDifference {
  path: string;
  left: unknown;
  right: unknown;
}

export const TERMINAL: ReadonlySet<State> = new Set(["CANCELLED", "SUCCEEDED", "FAILED"]);
