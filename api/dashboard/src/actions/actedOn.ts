import type { JobView } from "../api/types";

/** What an action needs to know of the job it acts on. */
export type ActedOn = Pick<JobView, "id" | "name" | "state" | "desired" | "progress">;
