/** The actions on a job in its present state; each explains its effect before it is confirmed. */

import { useState } from "react";
import { Link } from "wouter";
import { send } from "../api/client";
import { ended, type JobView, type State, type WorldPeriodView } from "../api/types";
import { jobPath } from "../data";
import { count, plural } from "../format";
import { Confirm } from "../ui/dialog";
import { Icon } from "../ui/icons";
import { useAction } from "../ui/toasts";
import type { ActionTarget } from "./actionTarget";
import { InjectDialog } from "./InjectDialog";
import { ResizeDialog } from "./ResizeDialog";
import { resizeRange } from "./resizing";

type OpenDialog = "pause" | "resume" | "cancel" | "inject" | "resize" | null;

const PAUSABLE: ReadonlySet<State> = new Set<State>(["QUEUED", "STARTING", "RUNNING", "RECOVERING", "RESIZING"]);
const ON_CLUSTER: ReadonlySet<State> = new Set<State>(["STARTING", "RUNNING", "RECOVERING", "RESIZING"]);

interface JobActionsProps {
  job: ActionTarget;
  /** The present world; null while the job has none. */
  world: WorldPeriodView | null;
  /** Whether the server allows fault injection (`ClusterView.fault_injection`). */
  faultInjection: boolean;
  onChanged: (job: JobView) => void;
}

export function JobActions({ job, world, faultInjection, onChanged }: JobActionsProps) {
  const [dialog, setDialog] = useState<OpenDialog>(null);
  const close = () => setDialog(null);
  const wantsRunning = job.desired === "running";
  const range = resizeRange(job.spec);
  return (
    <div className="line wrap" role="group" aria-label="Actions">
      {faultInjection && ON_CLUSTER.has(job.state) && (
        <button type="button" className="button" onClick={() => setDialog("inject")}>
          <Icon name="bolt" /> Inject a fault
        </button>
      )}
      {range && job.desired !== "cancelled" && !ended(job.state) && (
        <button type="button" className="button" onClick={() => setDialog("resize")}>
          <Icon name="resize" /> Resize
        </button>
      )}
      {wantsRunning && PAUSABLE.has(job.state) && (
        <button type="button" className="button" onClick={() => setDialog("pause")}>
          <Icon name="pause" /> Pause
        </button>
      )}
      {job.desired === "paused" && !ended(job.state) && (
        <button type="button" className="button" onClick={() => setDialog("resume")}>
          <Icon name="play" /> Resume
        </button>
      )}
      {!ended(job.state) && (
        <button type="button" className="button danger" onClick={() => setDialog("cancel")}>
          <Icon name="stop" /> {job.state === "CANCELLING" ? "Cancel now" : "Cancel"}
        </button>
      )}
      <Link to={`/submit?from=${encodeURIComponent(job.id)}`} className="button">
        <Icon name="copy" /> Edit a copy
      </Link>
      {dialog === "pause" && <Pause job={job} onClose={close} onChanged={onChanged} />}
      {dialog === "resume" && <Resume job={job} onClose={close} onChanged={onChanged} />}
      {dialog === "cancel" && <Cancel job={job} onClose={close} onChanged={onChanged} />}
      {dialog === "resize" && range && (
        <ResizeDialog job={job} world={world} range={range} onClose={close} onChanged={onChanged} />
      )}
      {dialog === "inject" && <InjectDialog job={job} onClose={close} />}
    </div>
  );
}

interface ActionDialogProps {
  job: ActionTarget;
  onClose: () => void;
  onChanged: (job: JobView) => void;
}

function Pause({ job, onClose, onChanged }: ActionDialogProps) {
  const { busy, run } = useAction();
  const pause = () =>
    void run(async () => onChanged(await send<JobView>("POST", jobPath(job.id, "/pause"))), `${job.name} is pausing`).then(onClose);
  return (
    <Confirm title={`Pause ${job.name}?`} action="Pause" busy={busy} onConfirm={pause} onClose={onClose}>
      <p className="second">
        The job completes its current step, saves its state to the remote tier and releases its nodes.
        After a resume it continues from there, bit for bit.
      </p>
    </Confirm>
  );
}

function Resume({ job, onClose, onChanged }: ActionDialogProps) {
  const { busy, run } = useAction();
  const resume = () =>
    void run(async () => onChanged(await send<JobView>("POST", jobPath(job.id, "/resume"))), `${job.name} is queued again`).then(onClose);
  return (
    <Confirm title={`Resume ${job.name}?`} action="Resume" busy={busy} onConfirm={resume} onClose={onClose}>
      <p className="second">
        The job is queued like a new job and continues from its newest checkpoint
        {job.progress.step === null ? "" : `; it had reached step ${count(job.progress.step)}`}.
      </p>
    </Confirm>
  );
}

function Cancel({ job, onClose, onChanged }: ActionDialogProps) {
  const { busy, run } = useAction();
  const [now, setNow] = useState(job.state === "CANCELLING");
  const { steps, step } = job.progress;
  const left = steps === null ? 0 : steps - (step ?? 0);
  const cancel = () =>
    void run(async () => onChanged(await send<JobView>("POST", jobPath(job.id, "/cancel"), { query: { now } })), `${job.name} is being cancelled`).then(onClose);
  return (
    <Confirm title={`Cancel ${job.name}?`} action="Cancel the job" danger busy={busy} onConfirm={cancel} onClose={onClose}>
      <p className="second">
        {left > 0 && `${plural(left, "step")} of ${count(steps ?? 0)} will not run. `}
        {now
          ? "The job ends immediately; unsaved state is lost."
          : "The job completes its current step and saves its state first."}{" "}
        A cancelled job never runs again, but another job can start from its checkpoints.
      </p>
      <label className="line">
        <input type="checkbox" checked={now} onChange={(event) => setNow(event.target.checked)} />
        <span>Immediately, without a last checkpoint</span>
      </label>
    </Confirm>
  );
}
