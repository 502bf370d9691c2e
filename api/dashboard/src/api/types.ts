/** The types of the API from the generated schema. */

import type { components } from "./schema";

type Schemas = components["schemas"];

export type JobView = Schemas["JobView"];
export type State = Schemas["State"];
export type IncidentView = Schemas["IncidentView"];
export type EventView = Schemas["EventView"];
export type EventPage = Schemas["EventPage"];
export type MetricPoint = Schemas["MetricPoint"];
export type MetricPage = Schemas["MetricPage"];
export type LogLineView = Schemas["LogLineView"];
export type LogPage = Schemas["LogPage"];
export type NodeView = Schemas["NodeView"];
export type CheckpointView = Schemas["CheckpointView"];
export type CheckpointPage = Schemas["CheckpointPage"];
export type OperationPage = Schemas["OperationPage"];
export type OperationView = Schemas["OperationView"];
export type FaultView = Schemas["FaultView"];
export type FaultKind = Schemas["FaultKind"];
export type Problem = Schemas["Problem"];
export type ProblemFault = Schemas["ProblemFault"];

export type JobRow = Schemas["JobRow"];
export type JobPage = Schemas["JobPage"];
export type VerdictView = Schemas["VerdictView"];
export type SpanKind = Schemas["SpanKind"];
export type SpanView = Schemas["SpanView"];
export type TimelineView = Schemas["TimelineView"];
export type WorldPeriodView = Schemas["WorldPeriodView"];
export type MeshChangeView = Schemas["MeshChangeView"];
export type WaitingView = Schemas["WaitingView"];
export type RankView = Schemas["RankView"];
export type RankDetailView = Schemas["RankDetailView"];
export type RankHeatView = Schemas["RankHeatView"];
export type RankMeasure = Schemas["RankMeasure"];
export type RanksView = Schemas["RanksView"];
export type GlanceView = Schemas["GlanceView"];
export type ClusterView = Schemas["ClusterView"];
export type SpecDifferenceView = Schemas["SpecDifferenceView"];
export type SpecDifferencePage = Schemas["SpecDifferencePage"];

export const STATES: readonly State[] = [
  "QUEUED", "STARTING", "RUNNING", "RECOVERING", "RESIZING", "PAUSING", "PAUSED",
  "CANCELLING", "CANCELLED", "SUCCEEDED", "FAILED",
];
const ENDED: ReadonlySet<State> = new Set<State>(["CANCELLED", "SUCCEEDED", "FAILED"]);
export const ended = (state: State): boolean => ENDED.has(state);
