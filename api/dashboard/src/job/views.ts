/** The types of the API that the job page reads, by shorter names. */

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

/** A quantity of each rank over time. */
export interface RankHistory {
  since: number;
  until: number;
  bucket_s: number;
  /** The number of buckets in a row. */
  buckets: number;
  ranks: readonly { rank: number; node: string }[];
  /** The rows in the order of `ranks`, one after another; NaN for a value that was not measured. */
  values: Float32Array;
}

/** A suspect of an incident; the API does not fix the fields. */
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
