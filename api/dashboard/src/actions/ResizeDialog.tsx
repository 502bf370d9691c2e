/** The dialog that orders a number of nodes for an elastic job. */

import { useState } from "react";
import { ApiError, send } from "../api/client";
import type { JobView, ProblemFault, WorldPeriodView } from "../api/types";
import { jobPath } from "../data";
import { plural } from "../format";
import { Confirm } from "../ui/dialog";
import { useAction } from "../ui/toasts";
import type { ActionTarget } from "./actionTarget";
import { orderText, sizeFault, type ResizeRange } from "./resizing";

interface ResizeDialogProps {
  job: ActionTarget;
  world: WorldPeriodView | null;
  range: ResizeRange;
  onClose: () => void;
  onChanged: (job: JobView) => void;
}

export function ResizeDialog({ job, world, range, onClose, onChanged }: ResizeDialogProps) {
  const ordered = job.wanted_nodes ?? null;
  const [limited, setLimited] = useState(true);
  const [text, setText] = useState(String(ordered ?? world?.nodes ?? range.max));
  const [faults, setFaults] = useState<readonly ProblemFault[]>([]);
  const { busy, run } = useAction();
  const fault = limited ? sizeFault(text, range) : null;
  const nodes = limited ? Number(text) : null;
  const resize = () =>
    void run(async () => {
      try {
        onChanged(await send<JobView>("POST", jobPath(job.id, "/resize"), { query: { nodes } }));
      } catch (error) {
        if (error instanceof ApiError) setFaults(error.faults);
        throw error;
      }
    }, `${job.name}: ${orderText(nodes, range)} ordered`).then((done) => done && onClose());
  const problem = fault ?? faults.map(({ message }) => message).join("; ");
  return (
    <Confirm title={`Resize ${job.name}`} action="Resize" busy={busy} disabled={fault !== null} onConfirm={resize} onClose={onClose}>
      <p className="second">
        {world
          ? "The job forms the ordered mesh after its current step, from the state in memory. To grow, it waits until nodes are free."
          : "The job has no nodes at present; it starts with the ordered size."}
      </p>
      <dl className="sizes">
        <dt>Present size</dt>
        <dd>{world ? plural(world.nodes, "node") : "no nodes"}</dd>
        <dt>Ordered size</dt>
        <dd>{orderText(ordered, range)}</dd>
      </dl>
      <fieldset className="field size-choice">
        <legend>New order</legend>
        <div className="line">
          <label className="line">
            <input type="radio" name="size" checked={limited} onChange={() => setLimited(true)} />
            <span>At most</span>
          </label>
          <input
            className="input size" type="number" min={range.min} max={range.max} step={1} value={text} aria-label="Nodes"
            aria-invalid={problem !== ""} aria-describedby="size-problem"
            onFocus={() => setLimited(true)}
            onChange={(event) => {
              setText(event.target.value);
              setFaults([]);
            }}
          />
          <span className="second">
            of {range.min} to {range.max} nodes
          </span>
        </div>
        <label className="line">
          <input type="radio" name="size" checked={!limited} onChange={() => setLimited(false)} />
          <span>As many as the spec allows ({range.max})</span>
        </label>
        <span id="size-problem" className="small is-failed" role="alert">
          {problem}
        </span>
      </fieldset>
    </Confirm>
  );
}
