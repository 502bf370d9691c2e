/** The checkpoints of a job by tier, with the actions on them. Part of the job page. */

import { useCallback, useEffect, useState } from "react";
import { Link } from "wouter";
import { send } from "../api/client";
import type { CheckpointView, OperationView } from "../api/types";
import { useCheckpoints, useNow } from "../data";
import { ago, bytes, count, moment, number } from "../format";
import { Confirm } from "../ui/dialog";
import { Icon } from "../ui/icons";
import { Failure } from "../ui/notice";
import { useAction } from "../ui/toasts";
import { LongWork } from "./LongWork";
import { active, type Kind } from "./operations";
import "./checkpoints.css";

const EVALUATED = "eval_loss";

export function Checkpoints({ id }: { id: string }) {
  const found = useCheckpoints(id);
  const [removed, setRemoved] = useState(false);
  const [operations, setOperations] = useState<readonly OperationView[]>([]);
  const { reload } = found;
  const onChanged = useCallback(() => void reload(), [reload]);
  useEffect(() => {
    const leaving = new AbortController();
    // What runs already is shown; without an answer the buttons are shown.
    active(id, leaving.signal).then(setOperations, () => undefined);
    return () => leaving.abort();
  }, [id]);
  const { value } = found;
  if (found.error && !value) return <Failure error={found.error} retry={() => void found.reload()} />;
  if (!value) return <div className="ghost" style={{ height: 120 }} aria-busy="true" />;
  const kept = value.items.filter((checkpoint) => checkpoint.deleted_at === null);
  const gone = value.items.length - kept.length;
  const shown = removed ? value.items : kept;
  const evaluated = shown.some((checkpoint) => EVALUATED in checkpoint.metrics);
  return (
    <div className="checkpoints">
      <div className="tiers">
        <div>
          <span className="dim small">In memory</span>
          {value.memory.protected_step !== null && <strong>step {count(value.memory.protected_step)}</strong>}
          <span className="dim small">{value.memory.where}</span>
        </div>
        <div>
          <span className="dim small">In the remote tier</span>
          <strong>{kept.length === 0 ? "none" : `step ${count(kept[0]?.step)}`}</strong>
          {kept.length > 1 && <span className="dim small">and {kept.length - 1} older</span>}
        </div>
        {gone > 0 && (
          <label className="line small second removed-switch">
            <input type="checkbox" checked={removed} onChange={(event) => setRemoved(event.target.checked)} /> Show {gone} removed
          </label>
        )}
      </div>
      {value.storage_problem && (
        <div className="notice warn" role="alert">
          <Icon name="warning" /> The storage does not answer: {value.storage_problem}
        </div>
      )}
      {shown.length === 0 ? (
        <p className="second nothing-saved">No checkpoint is in the remote tier.</p>
      ) : (
        <div className="scroll-x" tabIndex={0} role="region" aria-label="Remote checkpoints">
          <table className="table">
            <thead>
              <tr>
                <th>Step</th>
                <th>Saved</th>
                <th className="right">Size</th>
                <th className="right">Loss</th>
                {evaluated && <th className="right">Eval loss</th>}
                <th>Status</th>
                <th>
                  <span className="unseen">Actions</span>
                </th>
              </tr>
            </thead>
            <tbody>
              {shown.map((checkpoint) => (
                <CheckpointRow key={`${checkpoint.step} ${checkpoint.attempt}`} job={id} checkpoint={checkpoint} evaluated={evaluated} operations={operations} onChanged={onChanged} />
              ))}
            </tbody>
          </table>
        </div>
      )}
    </div>
  );
}

interface CheckpointRowProps {
  job: string;
  checkpoint: CheckpointView;
  /** Whether the table has a column of the loss in evaluations. */
  evaluated: boolean;
  /** Those that ran when the page was opened. */
  operations: readonly OperationView[];
  onChanged: () => void;
}

function CheckpointRow({ job, checkpoint, evaluated, operations, onChanged }: CheckpointRowProps) {
  const now = useNow();
  const { busy, run } = useAction();
  const [confirming, setConfirming] = useState(false);
  const at = `/jobs/${encodeURIComponent(job)}/checkpoints/${checkpoint.step}`;
  const running = (kind: Kind) => operations.find((one) => one.kind === kind && one.step === checkpoint.step);
  const removed = checkpoint.deleted_at !== null;
  const pin = () =>
    void run(() => send(checkpoint.pinned ? "DELETE" : "PUT", `${at}/pin`), checkpoint.pinned ? `Step ${checkpoint.step} is no longer pinned` : `Step ${checkpoint.step} is pinned`).then(onChanged);
  const remove = () =>
    void run(() => send("DELETE", at), `Step ${checkpoint.step} was removed`).then(() => {
      setConfirming(false);
      onChanged();
    });
  return (
    <tr className={removed ? "gone" : undefined}>
      <td>
        <strong>{count(checkpoint.step)}</strong> <span className="dim small">attempt {checkpoint.attempt}</span>
      </td>
      <td title={moment(checkpoint.saved_at)}>{ago(checkpoint.saved_at, now)}</td>
      <td className="right">{bytes(checkpoint.nbytes)}</td>
      <td className="right">{number(checkpoint.metrics["loss"])}</td>
      {evaluated && <td className="right">{number(checkpoint.metrics[EVALUATED])}</td>}
      <td>
        <CheckpointStatus checkpoint={checkpoint} />
      </td>
      <td className="right">
        {!removed && (
          <span className="line row-actions">
            {checkpoint.bad === null && (
              <Link to={`/submit?from=${encodeURIComponent(job)}&step=${checkpoint.step}`} className="button tiny" title="A new job that continues from this step">
                <Icon name="restart" size={14} /> Restart from here
              </Link>
            )}
            <LongWork job={job} step={checkpoint.step} kind="verify" running={running("verify")} onDone={onChanged} />
            <button type="button" className="button tiny" disabled={busy || checkpoint.pinned === null} onClick={pin}>
              <Icon name="pin" size={14} /> {checkpoint.pinned ? "Unpin" : "Pin"}
            </button>
            <LongWork job={job} step={checkpoint.step} kind="export" running={running("export")} onDone={onChanged} />
            <button type="button" className="button tiny icon danger" disabled={checkpoint.pinned === true} onClick={() => setConfirming(true)} aria-label={`Remove step ${checkpoint.step}`} title={checkpoint.pinned ? "Pinned: unpin it first" : "Remove"}>
              <Icon name="trash" size={14} />
            </button>
          </span>
        )}
        {confirming && (
          <Confirm title={`Remove the checkpoint of step ${checkpoint.step}?`} action="Remove" danger busy={busy} onConfirm={remove} onClose={() => setConfirming(false)}>
            <p className="second">{bytes(checkpoint.nbytes)} are deleted from the remote tier. This cannot be undone.</p>
          </Confirm>
        )}
      </td>
    </tr>
  );
}

function CheckpointStatus({ checkpoint }: { checkpoint: CheckpointView }) {
  if (checkpoint.deleted_at !== null) return <span className="dim">removed{checkpoint.deleted_why ? `: ${checkpoint.deleted_why}` : ""}</span>;
  return (
    <span className="line wrap">
      {checkpoint.bad !== null && <span className="tag bad" title={checkpoint.bad}>Damaged: {checkpoint.bad}</span>}
      {checkpoint.pinned && <span className="tag accent"><Icon name="pin" size={12} /> Pinned</span>}
      {checkpoint.best && <span className="tag good">Best</span>}
      {checkpoint.verified_at !== null && checkpoint.bad === null && (
        <span className="tag" title={`Every byte was verified ${moment(checkpoint.verified_at)}`}><Icon name="shield" size={12} /> Verified</span>
      )}
      {(checkpoint.needed_by?.length ?? 0) > 0 && <span className="tag warn" title={`${checkpoint.needed_by?.join(", ")} start from this checkpoint`}>Needed</span>}
    </span>
  );
}
