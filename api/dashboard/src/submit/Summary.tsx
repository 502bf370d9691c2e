/** The resources and work that a spec asks for; and the whole spec with its defaults. */

import { count, number, short } from "../format";
import { bringsProgram, meaningful } from "../job/level";
import { yaml } from "./write";

type Spec = Record<string, unknown>;

const part = (spec: Spec, ...path: string[]): unknown =>
  path.reduce<unknown>((at, key) => (typeof at === "object" && at !== null ? (at as Spec)[key] : undefined), spec);
const figure = (spec: Spec, ...path: string[]): number => Number(part(spec, ...path) ?? 0);

export function Summary({ spec }: { spec: Spec }) {
  const axes = (["pp", "dp_replicate", "dp_shard", "cp", "tp"] as const).map((axis) => [axis, figure(spec, "parallel", axis) || 1] as const);
  const world = axes.reduce((product, [, size]) => product * size, 1);
  const perNode = figure(spec, "resources", "workers_per_node") || 1;
  const standbys = figure(spec, "resources", "standby_nodes");
  const nodes = Math.ceil(world / perNode);
  const vision = part(spec, "model", "family") === "vit";
  const positions = vision ? Math.floor(figure(spec, "model", "image_size") / (figure(spec, "model", "patch_size") || 1)) ** 2 : figure(spec, "model", "sequence_length");
  const tokens = figure(spec, "train", "global_batch") * positions;
  const steps = figure(spec, "train", "steps");
  const program = bringsProgram(spec);
  const programSteps = figure(spec, "program", "steps");
  const every = (tier: string) => {
    const value = part(spec, "checkpoint", tier, "every_steps");
    return value === 0 ? "off" : value === "auto" ? "automatic interval" : `every ${value === 1 ? "step" : `${String(value)} steps`}`;
  };
  const mesh = axes.filter(([, size]) => size > 1).map(([axis, size]) => `${axis} ${size}`).join(" × ");
  return (
    <section className="card summary" aria-label="Summary">
      <dl>
        <dt>Ranks</dt>
        <dd>
          <strong>{count(world)}</strong> <span className="dim">{mesh}</span>
        </dd>
        <dt>Nodes</dt>
        <dd>
          <strong>{count(nodes + standbys)}</strong> <span className="dim">{standbys > 0 ? `${nodes} train, ${standbys} standby` : "no standby"}</span>
        </dd>
        <dt>Each node</dt>
        <dd>
          <strong>{number(perNode * figure(spec, "resources", "cpus_per_worker"))}</strong> {perNode * figure(spec, "resources", "cpus_per_worker") === 1 ? "CPU" : "CPUs"}
          {figure(spec, "resources", "gpus_per_worker") > 0 && <>, <strong>{number(perNode * figure(spec, "resources", "gpus_per_worker"))}</strong> GPUs</>}
        </dd>
        {program ? (
          <>
            <dt>Steps</dt>
            <dd>{programSteps ? <strong>{count(programSteps)}</strong> : "as many as the program takes"}</dd>
          </>
        ) : (
          <>
            <dt>Steps</dt>
            <dd>
              {steps ? <strong>{count(steps)}</strong> : "known once the sources are prepared,"} <span className="dim">of {short(tokens)} {vision ? "patches" : "tokens"}</span>
            </dd>
            <dt>{vision ? "Patches" : "Tokens"} in total</dt>
            <dd>
              {steps ? <strong>{short(tokens * steps)}</strong> : `${number(figure(spec, "train", "epochs"))} epochs`}
            </dd>
            <dt>Memory tier</dt>
            <dd>{every("memory")}</dd>
            <dt>Remote tier</dt>
            <dd>{every("remote")}</dd>
          </>
        )}
      </dl>
      <details>
        <summary>The whole spec with its defaults</summary>
        <pre tabIndex={0} aria-label="Resolved spec">{yaml(meaningful(spec, program))}</pre>
      </details>
    </section>
  );
}
