/** What the job page reads of the API: its own types by shorter names, as they are generated. */

import type { components } from "../api/schema";

type Schemas = components["schemas"];

export type State = Schemas["State"];
export type Job = Schemas["JobView"];
export type Verdict = Schemas["VerdictView"];
export type SpanKind = Schemas["SpanKind"];
export type Span = Schemas["SpanView"];
export type Timeline = Schemas["TimelineView"];
export type RankNow = Schemas["RankView"];
export type Ranks = Schemas["RanksView"];
export type RankDetail = Schemas["RankDetailView"];
export type HeatQuantity = Schemas["RankMeasure"];
export type MetricPoint = Schemas["MetricPoint"];
export type Metrics = Schemas["MetricPage"];
export type Incident = Schemas["IncidentView"];
export type JobEvent = Schemas["EventView"];
export type LogLine = Schemas["LogLineView"];
export type LogPage = Schemas["LogPage"];
export type SpecDifference = Schemas["SpecDifferenceView"];

/** Rank by time. */
export interface RankHistory {
  since: number;
  until: number;
  bucket_s: number;
  /** In one row. */
  buckets: number;
  ranks: readonly { rank: number; node: string }[];
  /** Row after row, one for each entry of `ranks`; NaN where nothing was measured. */
  values: Float32Array;
}

/** Of an incident; the API leaves open what a suspect says of itself. */
export interface Suspect {
  rank?: number;
  score?: number;
  reasons?: string[];
  agent?: string;
}

export interface Stack {
  ranks?: number[];
  frames?: string[];
}

export const TERMINAL: ReadonlySet<State> = new Set<State>(["CANCELLED", "SUCCEEDED", "FAILED"]);
