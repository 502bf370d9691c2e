/** The list of nodes: their health, jobs and incidents, with actions to cordon and uncordon. */

import { Fragment, useState } from "react";
import { Link } from "wouter";
import { json, send } from "../api/client";
import { rfc3339 } from "../api/times";
import type { NodeView } from "../api/types";
import { useNow } from "../data";
import { ago, duration, moment, number, plural, shortId } from "../format";
import { Confirm } from "../ui/dialog";
import { Icon } from "../ui/icons";
import { useAction } from "../ui/toasts";
import { devicesOf } from "./NodeMap";
import { isUsed, standingOf, STANDINGS } from "./standing";

interface NodesProps {
  nodes: readonly NodeView[];
  names: ReadonlyMap<string, string>;
  called: ReadonlyMap<string, string>;
  onChanged: () => void;
}

export function Nodes({ nodes, names, called, onChanged }: NodesProps) {
  return (
    <section className="card nodes" aria-label="Nodes">
      {nodes.length === 0 ? (
        <div className="empty">
          <h2>No node matches</h2>
        </div>
      ) : (
        <ul>
          {nodes.map((node) => (
            <NodeLine key={node.id} node={node} name={called.get(node.id) ?? node.id} names={names} onChanged={onChanged} />
          ))}
        </ul>
      )}
    </section>
  );
}

interface NodeLineProps {
  node: NodeView;
  name: string;
  names: ReadonlyMap<string, string>;
  onChanged: () => void;
}

function NodeLine({ node, name, names, onChanged }: NodeLineProps) {
  const [open, setOpen] = useState(false);
  const [confirming, setConfirming] = useState(false);
  const { busy, run } = useAction();
  const now = useNow();
  const shown = standingOf(node);
  const at = `/nodes/${encodeURIComponent(node.id)}`;
  const excluded = node.state !== "ready";
  const uncordon = () => void run(() => send("POST", `${at}/uncordon`), `${name} accepts ranks again`).then(onChanged);
  return (
    <li data-node={node.id}>
      <div className="node-line">
        <span className={`node-standing ${STANDINGS[shown].tone}`}>
          <i className="dot" />
          {STANDINGS[shown].label}
        </span>
        <button type="button" className="node-name" aria-expanded={open} onClick={() => setOpen(!open)}>
          <Icon name="chevron" size={12} />
          <span>
            <span className="strong" title={node.id}>{name}</span> {node.head && <span className="tag" title="The head of the cluster runs on it">head</span>}
          </span>
        </button>
        <span className="second small node-devices">{devicesOf(node)}</span>
        <span className="node-jobs">
          {node.jobs.map((id) => (
            <Link key={id} to={`/jobs/${id}`} className="tag accent cut">
              {names.get(id) ?? shortId(id)}
            </Link>
          ))}
          {node.standby_of.map((id) => (
            <Fragment key={`standby ${id}`}>
              <span className="small second" title="Kept to replace another node of the job">standby of</span>
              <Link to={`/jobs/${id}`} className="tag cut">
                {names.get(id) ?? shortId(id)}
              </Link>
            </Fragment>
          ))}
          {!isUsed(node) && node.there && <span className="dim small">{shown === "bare" ? "no CPUs" : "idle"}</span>}
        </span>
        <span className="node-health small">
          {excluded && <span className="second cut" title={node.reason ?? ""}>{node.reason}</span>}
          {excluded && node.until !== null && <span className="dim nowrap">back in {duration(node.until - now)}</span>}
          {!excluded && node.findings.map((finding, index) => (
            <span key={index} className={`tag ${finding.level === "unfit" ? "bad" : finding.level === "suspect" ? "warn" : ""}`} title={`${finding.probe}: ${finding.what}`}>
              <span className="cut">{finding.what}</span>
            </span>
          ))}
          {!node.there && <span className="dim">seen {ago(node.last_seen, now)}</span>}
        </span>
        <span className="node-act">
          {node.there &&
            (excluded ? (
              <button type="button" className="button tiny" disabled={busy} onClick={uncordon} aria-label={`Uncordon ${name}`}>
                Uncordon
              </button>
            ) : (
              <button type="button" className="button tiny" onClick={() => setConfirming(true)} aria-label={`Cordon ${name}`}>
                Cordon
              </button>
            ))}
        </span>
      </div>
      {open && <Details node={node} names={names} />}
      {confirming && <Cordon node={node} name={name} onClose={() => setConfirming(false)} onChanged={onChanged} />}
    </li>
  );
}

function Details({ node, names }: { node: NodeView; names: ReadonlyMap<string, string> }) {
  const now = useNow();
  const speeds = Object.entries(node.memory_gb_per_s);
  return (
    <div className="node-details">
      <dl>
        <dt>Name in commands</dt>
        <dd className="mono node-id">{node.id}</dd>
        <dt>Seen</dt>
        <dd>
          {ago(node.last_seen, now)}; first {moment(node.first_seen)}
        </dd>
        {node.since !== null && (
          <>
            <dt>{STANDINGS[standingOf(node)].label} since</dt>
            <dd>
              {moment(node.since)}
              {node.quarantines > 1 && ` (${plural(node.quarantines, "quarantine")} in a row)`}
            </dd>
          </>
        )}
        {speeds.length > 0 && (
          <>
            <dt>Memory bandwidth, last probe</dt>
            <dd>{speeds.map(([device, speed]) => `${device}: ${number(speed)} GB/s`).join(" · ")}</dd>
          </>
        )}
        <dt>Health</dt>
        <dd>
          {node.findings.length === 0 && "No findings."}
          {node.findings.map((finding, index) => (
            <div key={index}>
              <span className={`tag ${finding.level === "unfit" ? "bad" : finding.level === "suspect" ? "warn" : ""}`}>{finding.level}</span> {finding.probe} {finding.where && `(${finding.where})`}: {finding.what}
              {finding.code !== null && ` [XID ${finding.code}]`}
            </div>
          ))}
        </dd>
        <dt>Incidents</dt>
        <dd>
          {node.incidents.length === 0 && "No incidents."}
          {node.incidents.slice(0, 8).map((part) => (
            <div key={`${part.job} ${part.incident}`}>
              <Link to={`/jobs/${part.job}`}>{names.get(part.job) ?? shortId(part.job)}</Link> incident {part.incident}: {part.cause.replaceAll("_", " ")}, {ago(part.at, now)}
            </div>
          ))}
        </dd>
      </dl>
    </div>
  );
}

const TIMES = { "": "Until it is uncordoned", "3600": "1 hour", "21600": "6 hours", "86400": "1 day" } as const;

function Cordon({ node, name, onClose, onChanged }: { node: NodeView; name: string; onClose: () => void; onChanged: () => void }) {
  const [reason, setReason] = useState("");
  const [lasts_s, setLasts] = useState("");
  const { busy, run } = useAction();
  const until = lasts_s === "" ? null : Date.now() / 1000 + Number(lasts_s);
  const cordon = () =>
    void run(() => send("POST", `/nodes/${encodeURIComponent(node.id)}/cordon`, { body: json({ reason, until: until === null ? null : rfc3339(until) }) }), `${name} accepts no new ranks`).then((done) => {
      onChanged();
      if (done) onClose();
    });
  return (
    <Confirm title={`Cordon ${name}?`} action="Cordon" busy={busy} disabled={reason.trim() === ""} onConfirm={cordon} onClose={onClose}>
      <p className="second">
        No new ranks are placed on this node. {node.jobs.length > 0 && "Its present ranks move as soon as a standby is ready; no step is lost."}
      </p>
      <div className="field">
        <label htmlFor="cordon-reason">Reason</label>
        <input id="cordon-reason" className="input" required maxLength={500} value={reason} onChange={(event) => setReason(event.target.value)} placeholder="disk replacement" autoFocus />
      </div>
      <div className="field">
        <label htmlFor="cordon-time">Duration</label>
        <select id="cordon-time" className="input" value={lasts_s} onChange={(event) => setLasts(event.target.value)}>
          {Object.entries(TIMES).map(([value, label]) => (
            <option key={value} value={value}>
              {label}
            </option>
          ))}
        </select>
      </div>
    </Confirm>
  );
}
