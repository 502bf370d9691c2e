/** The dialog that injects a fault into a running job. */

import { useState } from "react";
import { ApiError, idempotencyKey, json, send } from "../api/client";
import type { FaultKind, FaultView, ProblemFault } from "../api/types";
import { Confirm } from "../ui/dialog";
import { useAction } from "../ui/toasts";
import { FAULTS, FIELDS, GROUPS, PHASES, takesPhase, takesRank } from "./faults";
import type { ActionTarget } from "./actionTarget";

export function InjectDialog({ job, onClose }: { job: ActionTarget; onClose: () => void }) {
  const [kind, setKind] = useState<FaultKind>("kill");
  const [values, setValues] = useState<Record<string, string>>({});
  const [faults, setFaults] = useState<readonly ProblemFault[]>([]);
  const [key] = useState(idempotencyKey);
  const { busy, run } = useAction();
  const set = (name: string, value: string) => setValues((all) => ({ ...all, [name]: value }));
  const inject = () =>
    void run(async () => {
      try {
        await send<FaultView>("POST", `/jobs/${encodeURIComponent(job.id)}/faults`, { body: json(faultDocument(kind, values)), key });
      } catch (error) {
        if (error instanceof ApiError) setFaults(error.faults);
        throw error;
      }
    }, `${FAULTS[kind].label}: requested`).then((done) => done && onClose());

  const field = (name: string, label: string, hint: string, type: "number" | "text" = "number", step?: string) => (
    <div className="field" key={name}>
      <label htmlFor={`fault-${name}`}>{label}</label>
      <input
        id={`fault-${name}`} className="input" type={type} step={step} placeholder={hint} value={values[name] ?? ""}
        onChange={(event) => set(name, event.target.value)}
      />
      {faults.filter((fault) => fault.path === name).map((fault) => (
        <span key={fault.message} className="small is-failed" role="alert">{fault.message}</span>
      ))}
    </div>
  );

  return (
    <Confirm title={`Inject a fault into ${job.name}`} action="Inject" danger busy={busy} onConfirm={inject} onClose={onClose}>
      <p className="second">The fault is real: the affected processes and state are lost, and the job has to recover.</p>
      <div className="field">
        <label htmlFor="fault-kind">Fault</label>
        <select id="fault-kind" className="input" value={kind} onChange={(event) => setKind(event.target.value as FaultKind)}>
          {GROUPS.map((group) => (
            <optgroup key={group} label={group}>
              {(Object.keys(FAULTS) as FaultKind[]).filter((candidate) => FAULTS[candidate].group === group).map((candidate) => (
                <option key={candidate} value={candidate}>
                  {FAULTS[candidate].label}
                </option>
              ))}
            </optgroup>
          ))}
        </select>
      </div>
      <div className="fault-fields">
        {takesRank(kind) && field("rank", "Rank", "random")}
        {takesRank(kind) && field("at_step", "At step", "immediately")}
        {takesPhase(kind) && (
          <div className="field">
            <label htmlFor="fault-phase">In phase</label>
            <select id="fault-phase" className="input" value={values["phase"] ?? ""} onChange={(event) => set("phase", event.target.value)}>
              <option value="">any</option>
              {PHASES.map((phase) => (
                <option key={phase}>{phase}</option>
              ))}
            </select>
          </div>
        )}
        {FAULTS[kind].fields.map((name) => field(name, FIELDS[name].label, FIELDS[name].hint, FIELDS[name].type, FIELDS[name].step))}
      </div>
    </Confirm>
  );
}

/** The request body of the fault; empty fields are omitted. */
function faultDocument(kind: FaultKind, values: Record<string, string>): Record<string, unknown> {
  const names: string[] = [...(takesRank(kind) ? ["rank", "at_step"] : []), ...(takesPhase(kind) ? ["phase"] : []), ...FAULTS[kind].fields];
  const texts = new Set(["phase", ...Object.entries(FIELDS).filter(([, field]) => field.type === "text").map(([name]) => name)]);
  const given = names.filter((name) => (values[name] ?? "") !== "");
  return { kind, ...Object.fromEntries(given.map((name) => [name, texts.has(name) ? values[name] : Number(values[name])])) };
}
