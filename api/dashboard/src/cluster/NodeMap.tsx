/** A map of the nodes: the colour of a tile shows the standing, its filling whether a job runs. */

import type { NodeView } from "../api/types";
import { number, plural } from "../format";
import { standingOf, STANDINGS } from "./standing";

interface NodeMapProps {
  nodes: readonly NodeView[];
  names: ReadonlyMap<string, string>;
  onPick: (id: string) => void;
}

const DEVICES_SHOWN = 8;

export function NodeMap({ nodes, names, onPick }: NodeMapProps) {
  return (
    <section className="card node-map" aria-label="Map of the nodes">
      {nodes.map((node) => {
        const shown = standingOf(node);
        const jobs = node.jobs.map((id) => names.get(id) ?? id.slice(0, 8));
        const devices = Math.min(DEVICES_SHOWN, Math.max(1, Math.round(node.gpus || node.cpus)));
        const facts = [node.host || node.id, STANDINGS[shown].label, devicesOf(node), jobs.length ? jobs.join(", ") : "idle"];
        return (
          <button key={node.id} type="button" className={`node-tile ${STANDINGS[shown].tone}`} data-busy={jobs.length > 0} onClick={() => onPick(node.id)} title={facts.join(" · ")} aria-label={facts.join(", ")}>
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
