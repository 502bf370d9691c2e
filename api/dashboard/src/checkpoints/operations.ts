/** Long work on a checkpoint: the server carries it on, whether or not this page looks. */

import { ApiError, Unreachable, get, send, url } from "../api/client";
import type { OperationPage, OperationView, Problem } from "../api/types";

const LOOK_MS = 500;

export type Kind = OperationView["kind"];

export function start(job: string, step: number, kind: Kind): Promise<OperationView> {
  return send<OperationView>("POST", `/jobs/${encodeURIComponent(job)}/checkpoints/${step}/${kind}`);
}

export async function active(job: string, signal?: AbortSignal): Promise<OperationView[]> {
  return (await get<OperationPage>("/operations", { job, active: true }, signal)).items;
}

export function cancel(operation: OperationView): Promise<OperationView> {
  return send<OperationView>("POST", `/operations/${operation.id}/cancel`);
}

export const hasEnded = ({ state }: OperationView): boolean => state !== "PENDING" && state !== "RUNNING";

/** Look until the operation has ended. Raises ApiError if it failed. */
export async function follow(operation: OperationView, onProgress: (operation: OperationView) => void, signal: AbortSignal): Promise<OperationView> {
  let seen = operation;
  while (!hasEnded(seen)) {
    onProgress(seen);
    await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
    try {
      seen = await get<OperationView>(`/operations/${operation.id}`, {}, signal);
    } catch (error) {
      if (!isPassing(error)) throw error;
    }
  }
  if (seen.state === "FAILED") throw new ApiError(seen.error as unknown as Problem);
  return seen;
}

/** The server may be back soon, or another one. */
const isPassing = (error: unknown): boolean => error instanceof Unreachable || (error instanceof ApiError && error.status >= 502);

/** Let the browser save the file of an export. */
export function save(operation: OperationView): void {
  const link = document.createElement("a");
  link.href = url(`/operations/${operation.id}/content`);
  link.download = operation.content?.name ?? "";
  link.click();
}

/** The share that is done, in whole percent. */
export function percent({ done_bytes, total_bytes }: OperationView): number {
  return total_bytes ? Math.floor((100 * done_bytes) / total_bytes) : 0;
}
