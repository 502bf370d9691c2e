/** The dialog that injects a fault into a running job. */

import { useState } from "react";
import { ApiError, idempotencyKey, json, send } from "../api/client";
import type { FaultKind, FaultView, ProblemFault } from "../api/types";
import { Confirm } from "../ui/dialog";
import { useAction } from "../ui/toasts";
import { FAULTS, GROUPS, KINDS, faultDocument, keptValues, type FaultParameter } from "./faults";
import type { ActionTarget } from "./actionTarget";

export function InjectDialog({ job, onClose }: { job: ActionTarget; onClose: () => void }) {
  const [kind, setKind] = useState<FaultKind>("kill");
  const [values, setValues] = useState<Record<string, string>>({});
  const [faults, setFaults] = useState<readonly ProblemFault[]>([]);
  const [key] = useState(idempotencyKey);
  const { busy, run } = useAction();
  const set = (name: string, value: string) => setValues((all) => ({ ...all, [name]: value }));
  const choose = (chosen: FaultKind) => {
    setKind(chosen);
    setValues(keptValues(chosen, values));
    setFaults([]);
  };
  const inject = () =>
    void run(async () => {
      try {
        await send<FaultView>("POST", `/jobs/${encodeURIComponent(job.id)}/faults`, { body: json(faultDocument(kind, values)), key });
      } catch (error) {
        if (error instanceof ApiError) setFaults(error.faults);
        throw error;
      }
    }, `${FAULTS[kind].label}: requested`).then((done) => done && onClose());

  const field = ({ name, label, words, limits, ...parameter }: FaultParameter) => {
    const [id, value, hint] = [`fault-${name}`, values[name] ?? "", String(parameter.default ?? parameter.unset)];
    return (
      <div className="field" key={name}>
        <label htmlFor={id}>{label}</label>
        {words.length > 0 ? (
          <select id={id} className="input" value={value} onChange={(event) => set(name, event.target.value)}>
            <option value="">{parameter.default === null ? hint : `${hint} (default)`}</option>
            {words.map((word) => (
              <option key={word}>{word}</option>
            ))}
          </select>
        ) : (
          <input
            id={id} className="input" type={limits ? "number" : "text"} step="any" placeholder={hint} value={value}
            onChange={(event) => set(name, event.target.value)}
          />
        )}
        {faults.filter((fault) => fault.path === name).map((fault) => (
          <span key={fault.message} className="small is-failed" role="alert">{fault.message}</span>
        ))}
      </div>
    );
  };

  return (
    <Confirm title={`Inject a fault into ${job.name}`} action="Inject" danger busy={busy} onConfirm={inject} onClose={onClose}>
      <p className="second">The fault is real: the affected processes and state are lost, and the job has to recover.</p>
      <div className="field">
        <label htmlFor="fault-kind">Fault</label>
        <select id="fault-kind" className="input" value={kind} onChange={(event) => choose(event.target.value as FaultKind)}>
          {GROUPS.map((group) => (
            <optgroup key={group} label={group}>
              {KINDS.filter((candidate) => FAULTS[candidate].group === group).map((candidate) => (
                <option key={candidate} value={candidate}>
                  {FAULTS[candidate].label}
                </option>
              ))}
            </optgroup>
          ))}
        </select>
      </div>
      <div className="fault-fields">
        {FAULTS[kind].parameters.map(field)}
      </div>
    </Confirm>
  );
}
