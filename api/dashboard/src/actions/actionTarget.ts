import type { JobView } from "../api/types";

/** The fields of a job that an action needs. */
export type ActionTarget = Pick<JobView, "id" | "name" | "state" | "desired" | "progress" | "spec" | "wanted_nodes">;
