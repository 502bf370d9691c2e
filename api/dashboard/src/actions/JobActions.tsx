/** What may be done with a job in its present state; each thing says first what it will lead to. */

import { useState } from "react";
import { send } from "../api/client";
import { ended, type JobView, type State } from "../api/types";
import { count, plural } from "../format";
import { Link } from "../routing/router";
import { Confirm } from "../ui/dialog";
import { Icon } from "../ui/icons";
import { useAction } from "../ui/toasts";
import type { ActedOn } from "./actedOn";
import { InjectDialog } from "./InjectDialog";

type Asked = "pause" | "resume" | "cancel" | "inject" | null;

const PAUSABLE: ReadonlySet<State> = new Set<State>(["QUEUED", "STARTING", "RUNNING", "RECOVERING", "RESIZING"]);
const ON_CLUSTER: ReadonlySet<State> = new Set<State>(["STARTING", "RUNNING", "RECOVERING", "RESIZING"]);

interface JobActionsProps {
  job: ActedOn;
  /** Whether the server breaks things on request (`ClusterView.fault_injection`). */
  faultInjection: boolean;
  onChanged: (job: JobView) => void;
}

export function JobActions({ job, faultInjection, onChanged }: JobActionsProps) {
  const [asked, setAsked] = useState<Asked>(null);
  const close = () => setAsked(null);
  const wantsRunning = job.desired === "running";
  return (
    <div className="line wrap" role="group" aria-label="Actions">
      {faultInjection && ON_CLUSTER.has(job.state) && (
        <button type="button" className="button" onClick={() => setAsked("inject")}>
          <Icon name="bolt" /> Inject a fault
        </button>
      )}
      {wantsRunning && PAUSABLE.has(job.state) && (
        <button type="button" className="button" onClick={() => setAsked("pause")}>
          <Icon name="pause" /> Pause
        </button>
      )}
      {job.desired === "paused" && !ended(job.state) && (
        <button type="button" className="button" onClick={() => setAsked("resume")}>
          <Icon name="play" /> Resume
        </button>
      )}
      {!ended(job.state) && (
        <button type="button" className="button danger" onClick={() => setAsked("cancel")}>
          <Icon name="stop" /> {job.state === "CANCELLING" ? "Cancel at once" : "Cancel"}
        </button>
      )}
      <Link to={`/submit?from=${encodeURIComponent(job.id)}`} className="button">
        <Icon name="copy" /> Edit a copy
      </Link>
      {asked === "pause" && <Pause job={job} onClose={close} onChanged={onChanged} />}
      {asked === "resume" && <Resume job={job} onClose={close} onChanged={onChanged} />}
      {asked === "cancel" && <Cancel job={job} onClose={close} onChanged={onChanged} />}
      {asked === "inject" && <InjectDialog job={job} onClose={close} />}
    </div>
  );
}

interface AskProps {
  job: ActedOn;
  onClose: () => void;
  onChanged: (job: JobView) => void;
}

const path = (job: ActedOn, verb: string) => `/jobs/${encodeURIComponent(job.id)}/${verb}`;

function Pause({ job, onClose, onChanged }: AskProps) {
  const { busy, run } = useAction();
  const pause = () =>
    void run(async () => onChanged(await send<JobView>("POST", path(job, "pause"))), `${job.name} is pausing`).then(onClose);
  return (
    <Confirm title={`Pause ${job.name}?`} action="Pause" busy={busy} onConfirm={pause} onClose={onClose}>
      <p className="second">
        It makes one last step, saves its state to the remote tier and gives its nodes back. When it is
        resumed, it goes on from there with the same bits.
      </p>
    </Confirm>
  );
}

function Resume({ job, onClose, onChanged }: AskProps) {
  const { busy, run } = useAction();
  const resume = () =>
    void run(async () => onChanged(await send<JobView>("POST", path(job, "resume"))), `${job.name} is queued again`).then(onClose);
  return (
    <Confirm title={`Resume ${job.name}?`} action="Resume" busy={busy} onConfirm={resume} onClose={onClose}>
      <p className="second">
        It is queued like a new job and goes on from its newest checkpoint; it was at step {count(job.progress.step)}.
      </p>
    </Confirm>
  );
}

function Cancel({ job, onClose, onChanged }: AskProps) {
  const { busy, run } = useAction();
  const [now, setNow] = useState(job.state === "CANCELLING");
  const left = job.progress.steps - job.progress.step;
  const cancel = () =>
    void run(async () => onChanged(await send<JobView>("POST", path(job, "cancel"), { query: { now } })), `${job.name} is being cancelled`).then(onClose);
  return (
    <Confirm title={`Cancel ${job.name}?`} action="Cancel the job" danger busy={busy} onConfirm={cancel} onClose={onClose}>
      <p className="second">
        {left > 0 && `${plural(left, "step")} of ${count(job.progress.steps)} will not be made. `}
        {now ? "It ends at once; what was not saved is lost." : "It makes one last step and saves its state first."} A
        cancelled job never runs again, but another can begin from its checkpoints.
      </p>
      <label className="line">
        <input type="checkbox" checked={now} onChange={(event) => setNow(event.target.checked)} />
        <span>At once, without a last checkpoint</span>
      </label>
    </Confirm>
  );
}
