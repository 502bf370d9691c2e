/** Break something of a running job on purpose, to see what comes of it. */

import { useState } from "react";
import { ApiError, idempotencyKey, json, send } from "../api/client";
import type { FaultKind, FaultView, ProblemFault } from "../api/types";
import { Confirm } from "../ui/dialog";
import { useAction } from "../ui/toasts";
import { FAULTS, FIELDS, GROUPS, PHASES, takesPhase, takesRank } from "./faults";
import type { ActedOn } from "./actedOn";

export function InjectDialog({ job, onClose }: { job: ActedOn; onClose: () => void }) {
  const [kind, setKind] = useState<FaultKind>("kill");
  const [values, setValues] = useState<Record<string, string>>({});
  const [faults, setFaults] = useState<readonly ProblemFault[]>([]);
  const [key] = useState(idempotencyKey);
  const { busy, run } = useAction();
  const set = (name: string, value: string) => setValues((all) => ({ ...all, [name]: value }));
  const inject = () =>
    void run(async () => {
      try {
        await send<FaultView>("POST", `/jobs/${encodeURIComponent(job.id)}/faults`, { body: json(asked(kind, values)), key });
      } catch (error) {
        if (error instanceof ApiError) setFaults(error.faults);
        throw error;
      }
    }, `${FAULTS[kind].what}: asked for`).then((done) => done && onClose());

  const field = (name: string, label: string, hint: string, type: "number" | "text" = "number", step?: string) => (
    <div className="field" key={name}>
      <label htmlFor={`fault-${name}`}>{label}</label>
      <input
        id={`fault-${name}`} className="input" type={type} step={step} placeholder={hint} value={values[name] ?? ""}
        onChange={(event) => set(name, event.target.value)}
      />
      {faults.filter((one) => one.path === name).map((one) => (
        <span key={one.message} className="small is-failed" role="alert">{one.message}</span>
      ))}
    </div>
  );

  return (
    <Confirm title={`Inject a fault into ${job.name}`} action="Inject it" danger busy={busy} onConfirm={inject} onClose={onClose}>
      <p className="second">It is real: what it hits is lost, and the job has to recover from it.</p>
      <div className="field">
        <label htmlFor="fault-kind">What happens</label>
        <select id="fault-kind" className="input" value={kind} onChange={(event) => setKind(event.target.value as FaultKind)}>
          {GROUPS.map((group) => (
            <optgroup key={group} label={group}>
              {(Object.keys(FAULTS) as FaultKind[]).filter((one) => FAULTS[one].group === group).map((one) => (
                <option key={one} value={one}>
                  {FAULTS[one].what}
                </option>
              ))}
            </optgroup>
          ))}
        </select>
      </div>
      <div className="fault-fields">
        {takesRank(kind) && field("rank", "Rank", "by chance")}
        {takesRank(kind) && field("at_step", "At step", "at once")}
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
        {FAULTS[kind].takes.map((name) => field(name, FIELDS[name].label, FIELDS[name].hint, FIELDS[name].type, FIELDS[name].step))}
      </div>
    </Confirm>
  );
}

/** The document of the fault: what was left empty is left out. */
function asked(kind: FaultKind, values: Record<string, string>): Record<string, unknown> {
  const names: string[] = [...(takesRank(kind) ? ["rank", "at_step"] : []), ...(takesPhase(kind) ? ["phase"] : []), ...FAULTS[kind].takes];
  const texts = new Set(["phase", ...Object.entries(FIELDS).filter(([, one]) => one.type === "text").map(([name]) => name)]);
  const given = names.filter((name) => (values[name] ?? "") !== "");
  return { kind, ...Object.fromEntries(given.map((name) => [name, texts.has(name) ? values[name] : Number(values[name])])) };
}
