/** What a job can go on from, by tier, and what may be done with it. Part of the job page. */

import { useState } from "react";
import { send, url } from "../api/client";
import type { CheckpointView, VerificationView } from "../api/types";
import { useCheckpoints, useNow } from "../data";
import { ago, bytes, count, moment, number } from "../format";
import { Link } from "../routing/router";
import { Confirm } from "../ui/dialog";
import { Icon } from "../ui/icons";
import { Failure } from "../ui/notice";
import { useAction, useToasts } from "../ui/toasts";
import { verify } from "./verify";
import "./checkpoints.css";

export function Checkpoints({ id }: { id: string }) {
  const found = useCheckpoints(id);
  const [removed, setRemoved] = useState(false);
  const { value } = found;
  if (found.error && !value) return <Failure error={found.error} retry={() => void found.reload()} />;
  if (!value) return <div className="ghost" style={{ height: 120 }} aria-busy="true" />;
  const kept = value.remote.filter((one) => one.deleted_at === null);
  const gone = value.remote.length - kept.length;
  const shown = removed ? value.remote : kept;
  return (
    <div className="checkpoints">
      <div className="tiers">
        <div>
          <span className="dim small">In memory, on two nodes</span>
          <strong>{value.memory.protected_step === null ? "nothing" : `step ${count(value.memory.protected_step)}`}</strong>
        </div>
        <div>
          <span className="dim small">In the remote tier</span>
          <strong>{kept.length === 0 ? "nothing" : `step ${count(kept[0]?.step)}`}</strong>
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
          <Icon name="warning" /> The storage could not be asked: {value.storage_problem}
        </div>
      )}
      {shown.length === 0 ? (
        <p className="second nothing-saved">Nothing was saved to the remote tier yet.</p>
      ) : (
        <div className="scroll-x" tabIndex={0} role="region" aria-label="Remote checkpoints">
          <table className="table">
            <thead>
              <tr>
                <th>Step</th>
                <th>Saved</th>
                <th className="right">Size</th>
                <th className="right">Loss</th>
                <th>Standing</th>
                <th>
                  <span className="unseen">Actions</span>
                </th>
              </tr>
            </thead>
            <tbody>
              {shown.map((one) => (
                <Line key={`${one.step} ${one.attempt}`} job={id} checkpoint={one} onChanged={() => void found.reload()} />
              ))}
            </tbody>
          </table>
        </div>
      )}
    </div>
  );
}

interface LineProps {
  job: string;
  checkpoint: CheckpointView;
  onChanged: () => void;
}

function Line({ job, checkpoint: one, onChanged }: LineProps) {
  const now = useNow();
  const { busy, run } = useAction();
  const [asked, setAsked] = useState(false);
  const at = `/jobs/${encodeURIComponent(job)}/checkpoints/${one.step}`;
  const removed = one.deleted_at !== null;
  const pin = () =>
    void run(() => send(one.pinned ? "DELETE" : "PUT", `${at}/pin`), one.pinned ? `Step ${one.step} is pinned no more` : `Step ${one.step} is pinned`).then(onChanged);
  const remove = () =>
    void run(() => send("DELETE", at), `Step ${one.step} was removed`).then(() => {
      setAsked(false);
      onChanged();
    });
  return (
    <tr className={removed ? "gone" : undefined}>
      <td>
        <strong>{count(one.step)}</strong> <span className="dim small">attempt {one.attempt}</span>
      </td>
      <td title={moment(one.saved_at)}>{ago(one.saved_at, now)}</td>
      <td className="right">{bytes(one.nbytes)}</td>
      <td className="right">{number(one.metrics["loss"])}</td>
      <td>
        <Standing checkpoint={one} />
      </td>
      <td className="right">
        {!removed && (
          <span className="line row-actions">
            {one.bad === null && (
              <Link to={`/submit?from=${encodeURIComponent(job)}&step=${one.step}`} className="button tiny" title="A new job that goes on from this step">
                <Icon name="restart" size={14} /> Restart from here
              </Link>
            )}
            <Verify job={job} step={one.step} onDone={onChanged} />
            <button type="button" className="button tiny" disabled={busy || one.pinned === null} onClick={pin}>
              <Icon name="pin" size={14} /> {one.pinned ? "Unpin" : "Pin"}
            </button>
            <a className="button tiny icon" href={url(`/jobs/${encodeURIComponent(job)}/checkpoints/${one.step}/export`)} download aria-label={`Export step ${one.step} as safetensors`} title="Export as safetensors">
              <Icon name="download" size={14} />
            </a>
            <button type="button" className="button tiny icon danger" disabled={one.pinned === true} onClick={() => setAsked(true)} aria-label={`Remove step ${one.step}`} title={one.pinned ? "Pinned: unpin it first" : "Remove"}>
              <Icon name="trash" size={14} />
            </button>
          </span>
        )}
        {asked && (
          <Confirm title={`Remove the checkpoint of step ${one.step}?`} action="Remove it" danger busy={busy} onConfirm={remove} onClose={() => setAsked(false)}>
            <p className="second">{bytes(one.nbytes)} are deleted from the remote tier. This cannot be undone.</p>
          </Confirm>
        )}
      </td>
    </tr>
  );
}

function Standing({ checkpoint: one }: { checkpoint: CheckpointView }) {
  if (one.deleted_at !== null) return <span className="dim">removed{one.deleted_why ? `: ${one.deleted_why}` : ""}</span>;
  return (
    <span className="line wrap">
      {one.bad !== null && <span className="tag bad" title={one.bad}>Bad: {one.bad}</span>}
      {one.pinned && <span className="tag accent"><Icon name="pin" size={12} /> Pinned</span>}
      {one.best && <span className="tag good">Best</span>}
      {one.verified_at !== null && one.bad === null && (
        <span className="tag" title={`Every byte was read ${moment(one.verified_at)}`}><Icon name="shield" size={12} /> Verified</span>
      )}
      {(one.needed_by?.length ?? 0) > 0 && <span className="tag warn" title={`${one.needed_by?.join(", ")} are to begin with it`}>Needed</span>}
    </span>
  );
}

function Verify({ job, step, onDone }: { job: string; step: number; onDone: () => void }) {
  const [word, setWord] = useState<VerificationView | null>(null);
  const { tell, fail } = useToasts();
  const start = async () => {
    setWord({ step, attempt: 0, read_bytes: 0, nbytes: 1, done: false, bad: null, problem: null });
    try {
      const last = await verify(job, step, setWord);
      if (last?.problem) fail(new Error(last.problem));
      else if (last?.bad) fail(new Error(`Step ${step} is bad and set aside: ${last.bad}`));
      else tell(`Step ${step}: every byte is as it was saved`);
    } catch (error) {
      fail(error);
    }
    setWord(null);
    onDone();
  };
  if (word) return <span className="tag" role="status">{Math.floor((100 * word.read_bytes) / Math.max(1, word.nbytes))}% read</span>;
  return (
    <button type="button" className="button tiny" onClick={() => void start()}>
      <Icon name="shield" size={14} /> Verify
    </button>
  );
}
