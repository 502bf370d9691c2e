/** Every fault as a card: what it was, what showed it, what was decided and why, what it cost. */

import { useEffect, useId, useMemo, useState, type ReactNode } from "react";

import { within, type Window } from "./axis";
import { clock, compact, duration, moment, percent, ranges } from "./format";
import { costs, evidence, lostThings, phaseBars, tiers, title, total } from "./incidentFacts";
import { KINDS } from "./kinds";
import { Swatch } from "./Ribbon";
import type { Incident, Stack, Suspect } from "./views";

interface Props {
  incidents: readonly Incident[];
  window: Window | null;
  /** The one that is to be shown open, as asked for on the ribbon. */
  chosen: number | null;
  onRank: (rank: number) => void;
}

const AT_FIRST = 8;

export function IncidentCards({ incidents, window, chosen, onRank }: Props) {
  const [all, setAll] = useState(false);
  const found = useMemo(
    () =>
      incidents
        .filter((one) => window === null || touches(one, window))
        .sort((a, b) => b.number - a.number),
    [incidents, window],
  );
  if (!incidents.length) {
    return <p className="nothing">No fault so far. Each would be told here, with its evidence and what was done.</p>;
  }
  if (!found.length) return <p className="nothing">No incident in the stretch that is shown.</p>;
  const hidden = found.findIndex((one) => one.number === chosen) >= AT_FIRST;
  const shown = all || hidden ? found : found.slice(0, AT_FIRST);
  return (
    <>
      <ol className="incidents">
        {shown.map((one, index) => (
          <li key={one.number} id={`incident-${one.number}`}>
            <Card incident={one} open={one.number === chosen || (chosen === null && index === 0)} onRank={onRank} />
          </li>
        ))}
      </ol>
      {shown.length < found.length && (
        <button type="button" className="button quiet tiny" onClick={() => setAll(true)}>
          All {found.length} incidents
        </button>
      )}
    </>
  );
}

function touches(one: Incident, window: Window): boolean {
  const from = one.signalled_at ?? one.opened_at;
  return from <= window.until && (one.closed_at ?? Infinity) >= window.since;
}

function Card({ incident, open, onRank }: { incident: Incident; open: boolean; onRank: (rank: number) => void }) {
  const [shown, setShown] = useState(open);
  const body = useId();
  useEffect(() => {
    if (open) setShown(true);
  }, [open]);
  const took = total(incident);
  const at = incident.signalled_at ?? incident.opened_at;
  return (
    <article className={incident.closed_at === null ? "incident card open" : "incident card"}>
      <h3>
        <button
          type="button"
          className="incident-head"
          aria-expanded={shown}
          aria-controls={body}
          onClick={() => setShown(!shown)}
        >
          <span className="incident-number" aria-label={`Incident ${incident.number}`}>
            {incident.number}
          </span>
          <span className="incident-title">
            {title(incident)}
            <small>
              <time dateTime={new Date(at * 1000).toISOString()} title={moment(at)}>
                {clock(at)}
              </time>{" "}
              · attempt {incident.attempt} · {incident.decision ?? "nothing decided yet"}
            </small>
          </span>
          <span className="incident-took">
            {incident.closed_at === null ? <span className="tag warn">open</span> : duration(took)}
          </span>
          <PhaseStrip incident={incident} />
          <span className="chevron" aria-hidden="true" />
        </button>
      </h3>
      <div id={body} hidden={!shown}>
        {shown && <Body incident={incident} onRank={onRank} />}
      </div>
    </article>
  );
}

function PhaseStrip({ incident }: { incident: Incident }) {
  return (
    <span className="phase-strip" aria-hidden="true">
      {phaseBars(incident.phases_s).map((bar) => (
        <i
          key={bar.name}
          style={{ width: `${bar.share * 100}%`, background: `var(${KINDS[bar.kind].colour})` }}
        />
      ))}
    </span>
  );
}

function Body({ incident, onRank }: { incident: Incident; onRank: (rank: number) => void }) {
  return (
    <div className="incident-body">
      <dl className="costs">
        {costs(incident).map(({ label, value }) => (
          <div key={label}>
            <dd>{value}</dd>
            <dt>{label}</dt>
          </div>
        ))}
      </dl>
      <div className="incident-columns">
        <div>
          <Part name="Evidence">
            <ol className="evidence">
              {incident.evidence.map((one, index) => (
                <li key={index}>{evidence(one)}</li>
              ))}
            </ol>
          </Part>
          {incident.lost.length > 0 && (
            <Part name="Taken away">
              <ul className="plain">
                {lostThings(incident).map((one) => (
                  <li key={one}>{one}</li>
                ))}
              </ul>
            </Part>
          )}
          {incident.suspects.length > 0 && <Suspects suspects={incident.suspects as Suspect[]} onRank={onRank} />}
          {Object.keys(incident.tiers).length > 0 && (
            <Part name="State came from">
              <ul className="plain">
                {tiers(incident).map(({ tier, ranks }) => (
                  <li key={tier}>
                    <b>{tier}</b> <span className="second">{ranks.length === 1 ? "rank" : `${ranks.length} ranks:`} {ranges(ranks, 4)}</span>
                  </li>
                ))}
              </ul>
            </Part>
          )}
          {incident.resolution && (
            <Part name="How it ended">
              <p>{incident.resolution}</p>
            </Part>
          )}
        </div>
        <div>
          <Part name="Decision">
            <p className="decision">
              <span className="tag accent">{incident.decision ?? "none yet"}</span> {incident.reason}
            </p>
            {incident.refused.length > 0 && <Refused incident={incident} />}
            {incident.budget && <Budget incident={incident} />}
          </Part>
          <Phases incident={incident} />
        </div>
      </div>
      {incident.stacks.length > 0 && <Stacks stacks={incident.stacks as Stack[]} onRank={onRank} />}
    </div>
  );
}

function Part({ name, children }: { name: string; children: ReactNode }) {
  return (
    <section className="part">
      <h4>{name}</h4>
      {children}
    </section>
  );
}

function Refused({ incident }: { incident: Incident }) {
  return (
    <details className="refused">
      <summary>Why not something else</summary>
      <dl>
        {incident.refused.map((one) => (
          <div key={one.decision}>
            <dt>{one.decision}</dt>
            <dd>{one.why}</dd>
          </div>
        ))}
      </dl>
    </details>
  );
}

function Budget({ incident }: { incident: Incident }) {
  const budget = incident.budget!;
  const meters: [string, number, number][] = [
    ["failures", budget.failures, budget.max_failures],
    ["preemptions", budget.preemptions, budget.max_preemptions],
    ["attempts without a step", budget.without_progress, budget.max_without_progress],
  ];
  return (
    <ul className="budget" aria-label={`Budget within ${duration(budget.window_s)}`}>
      {meters.map(([name, used, most]) => (
        <li key={name}>
          <span>
            {used} of {most} <small>{name}</small>
          </span>
          <span className="bar" aria-hidden="true">
            <i style={{ width: `${Math.min(100, (used / Math.max(1, most)) * 100)}%` }} />
          </span>
        </li>
      ))}
    </ul>
  );
}

function Phases({ incident }: { incident: Incident }) {
  const bars = phaseBars(incident.phases_s);
  if (!bars.length) return null;
  const took = total(incident);
  const sum = bars.reduce((all, one) => all + one.seconds, 0);
  return (
    <Part name={took === null ? "Phases" : `Phases, ${duration(took)} in all`}>
      <div className="phase-bar" aria-hidden="true">
        {bars.map((bar) => (
          <i
            key={bar.name}
            title={`${bar.label} ${duration(bar.seconds)}`}
            style={{ width: `${bar.share * 100}%`, background: `var(${KINDS[bar.kind].colour})` }}
          />
        ))}
      </div>
      <ul className="phases">
        {bars.map((bar) => (
          <li key={bar.name}>
            <Swatch look={KINDS[bar.kind]} />
            <span>{bar.label}</span>
            <b>{duration(bar.seconds)}</b>
            <span className="dim">{percent(bar.seconds / sum, 0)}</span>
          </li>
        ))}
      </ul>
    </Part>
  );
}

function Suspects({ suspects, onRank }: { suspects: readonly Suspect[]; onRank: (rank: number) => void }) {
  return (
    <Part name="Suspects">
      <ul className="suspects">
        {suspects.map((one, index) => (
          <li key={index}>
            {one.rank == null ? (
              <b>{one.agent ?? "unknown"}</b>
            ) : (
              <button type="button" className="link" onClick={() => onRank(one.rank!)}>
                rank {one.rank}
              </button>
            )}
            <span className="score" title="how much speaks against it">
              <span className="bar" aria-hidden="true">
                <i style={{ width: `${Math.min(1, one.score ?? 0) * 100}%` }} />
              </span>
              {one.score == null ? "" : compact(one.score, 2)}
            </span>
            <span className="reasons">{(one.reasons ?? []).join(" · ")}</span>
          </li>
        ))}
      </ul>
    </Part>
  );
}

function Stacks({ stacks, onRank }: { stacks: readonly Stack[]; onRank: (rank: number) => void }) {
  return (
    <section className="part">
      <h4>Where the ranks stood</h4>
      <div className="stacks">
        {stacks.map((one, index) => {
          const ranks = one.ranks ?? [];
          const frames = one.frames ?? [];
          return (
            <details key={index} open={index === 0}>
              <summary>
                <b>
                  {ranks.length === 1 ? "rank" : `${ranks.length} ranks:`} {ranges(ranks, 4)}
                </b>{" "}
                <code>{frames[0]}</code>
              </summary>
              <Frames frames={frames} />
              {ranks.length === 1 && (
                <button type="button" className="button tiny quiet" onClick={() => onRank(ranks[0]!)}>
                  Open rank {ranks[0]}
                </button>
              )}
            </details>
          );
        })}
      </div>
    </section>
  );
}

/** A stack, the innermost frame first. */
export function Frames({ frames }: { frames: readonly string[] }) {
  return (
    <ol className="frames" tabIndex={0} aria-label="Stack, innermost first">
      {frames.map((frame, index) => {
        const parts = /^(.*?)( \(.*\))?$/.exec(frame);
        return (
          <li key={index}>
            <b>{parts?.[1] ?? frame}</b>
            <span>{parts?.[2] ?? ""}</span>
          </li>
        );
      })}
    </ol>
  );
}

/** How many incidents the stretch has. */
export function incidentsWithin(incidents: readonly Incident[], window: Window | null): number {
  return incidents.filter((one) => within(one.signalled_at ?? one.opened_at, window)).length;
}
