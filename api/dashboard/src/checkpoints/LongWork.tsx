/** The buttons that verify and export a checkpoint, with the progress of what they started. */

import { useCallback, useEffect, useRef, useState } from "react";
import type { OperationView } from "../api/types";
import { Icon } from "../ui/icons";
import { useToasts } from "../ui/toasts";
import { cancel, follow, percent, save, start, type Kind } from "./operations";

const NAMES = {
  verify: { doing: "Verifying", noun: "verification" },
  export: { doing: "Exporting", noun: "export" },
} as const;

interface LongWorkProps {
  job: string;
  step: number;
  kind: Kind;
  /** What was running when the page was opened. */
  running: OperationView | undefined;
  onDone: () => void;
}

export function LongWork({ job, step, kind, running, onDone }: LongWorkProps) {
  const [operation, setOperation] = useState<OperationView | null>(null);
  const { notify, fail } = useToasts();
  const leaving = useRef<AbortController>(new AbortController());
  useEffect(() => {
    leaving.current = new AbortController();
    return () => leaving.current.abort();
  }, []);
  const watch = useCallback(
    async (begun: Promise<OperationView>, mine: boolean) => {
      const { signal } = leaving.current;
      try {
        const ended = await follow(await begun, setOperation, signal);
        if (ended.bad) fail(new Error(`Step ${step} is damaged and quarantined: ${ended.bad}`));
        else if (ended.state === "CANCELLED") notify(`Step ${step}: cancelled`);
        else if (kind === "verify") notify(`Step ${step}: every byte is intact`);
        else if (mine) save(ended);
      } catch (error) {
        if (signal.aborted) return;
        fail(error);
      }
      setOperation(null);
      onDone();
    },
    [kind, step, fail, notify, onDone],
  );
  useEffect(() => {
    if (running && operation === null) void watch(Promise.resolve(running), false);
    // Once for each operation that was running.
  }, [running?.id]);
  if (operation) {
    return (
      <span className="tag" role="status">
        {NAMES[kind].doing}: {percent(operation)}% read
        <button type="button" className="button tiny icon" aria-label={`Cancel the ${NAMES[kind].noun} of step ${step}`} title="Cancel" onClick={() => void cancel(operation).catch(fail)}>
          <Icon name="close" size={12} />
        </button>
      </span>
    );
  }
  const begin = () => void watch(start(job, step, kind), true);
  if (kind === "verify") {
    return (
      <button type="button" className="button tiny" onClick={begin}>
        <Icon name="shield" size={14} /> Verify
      </button>
    );
  }
  return (
    <button type="button" className="button tiny icon" onClick={begin} aria-label={`Export step ${step} as safetensors`} title="Export as safetensors">
      <Icon name="download" size={14} />
    </button>
  );
}
