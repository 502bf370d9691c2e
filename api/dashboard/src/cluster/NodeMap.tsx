/** A map of the nodes: the colour of a tile shows the standing, its filling whether a job has it. */

import type { NodeView } from "../api/types";
import { number, plural, shortId } from "../format";
import { isStandby, standingOf, STANDINGS } from "./standing";

interface NodeMapProps {
  nodes: readonly NodeView[];
  names: ReadonlyMap<string, string>;
  called: ReadonlyMap<string, string>;
  onPick: (name: string) => void;
}

const DEVICES_SHOWN = 8;

export function NodeMap({ nodes, names, called, onPick }: NodeMapProps) {
  return (
    <section className="card node-map" aria-label="Map of the nodes">
      {nodes.map((node) => {
        const shown = standingOf(node);
        const name = called.get(node.id) ?? node.id;
        const use = useOf(node, (id) => names.get(id) ?? shortId(id));
        const devices = Math.min(DEVICES_SHOWN, Math.max(1, Math.round(node.gpus || node.cpus)));
        const facts = [name, node.head ? "head" : "", STANDINGS[shown].label, devicesOf(node), use].filter(Boolean);
        return (
          <button key={node.id} type="button" className={`node-tile ${STANDINGS[shown].tone}`} data-busy={isStandby(node) ? "standby" : node.jobs.length > 0} onClick={() => onPick(name)} title={facts.join(" · ")} aria-label={facts.join(", ")}>
            {Array.from({ length: devices }, (_, index) => (
              <i key={index} />
            ))}
          </button>
        );
      })}
    </section>
  );
}

export const devicesOf = (node: NodeView): string =>
  [node.gpus > 0 ? plural(node.gpus, "GPU") : "", `${number(node.cpus)} ${node.cpus === 1 ? "CPU" : "CPUs"}`].filter(Boolean).join(", ");

/** "run-a, run-b", "standby of run-a", "idle"; empty for a node that cannot be used. */
export function useOf(node: NodeView, nameOf: (job: string) => string): string {
  if (node.jobs.length > 0) return node.jobs.map(nameOf).join(", ");
  if (isStandby(node)) return `standby of ${node.standby_of.map(nameOf).join(", ")}`;
  return ["gone", "bare"].includes(standingOf(node)) ? "" : "idle";
}
