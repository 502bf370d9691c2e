/** The incidents as cards: the fault, its evidence, the decision with its reason, and the costs. */

import { useEffect, useId, useMemo, useRef, useState, type ReactNode } from "react";

import type { IncidentView } from "../../api/types";
import { within, type Window } from "../axis";
import { clock, compact, fineDuration, moment, NodeIdShortener, finePercent } from "../format";
import {
  costs,
  isResize,
  learnNodeIds,
  phaseBars,
  ranksText,
  sentences,
  title,
  total,
} from "./incidentFacts";
import { KINDS } from "./kinds";
import { Swatch } from "../Ribbon";
import { ARROWS, changeText, direction } from "../worldLayout";

interface IncidentCardsProps {
  incidents: readonly IncidentView[];
  window: Window | null;
  /** The number of the incident to show open, as selected on the ribbon. */
  chosen: number | null;
  onRank: (rank: number) => void;
  /** Only so many of the newest, folded unless they are going on. */
  newest?: number;
}

const INITIAL_CARDS = 8;

export function IncidentCards({ incidents, window, chosen, onRank, newest }: IncidentCardsProps) {
  const [all, setAll] = useState(false);
  const found = useMemo(
    () =>
      incidents
        .filter((incident) => window === null || incident.number === chosen || overlaps(incident, window))
        .sort((a, b) => b.number - a.number),
    [incidents, window, chosen],
  );
  const ids = useMemo(() => {
    const shortener = new NodeIdShortener();
    learnNodeIds(shortener, incidents);
    return shortener;
  }, [incidents]);
  if (!incidents.length) {
    return <p className="nothing">No fault and no resize. An incident stands here with its evidence and the decision about it.</p>;
  }
  if (!found.length) return <p className="nothing">No incident in the selected interval.</p>;
  const hidden = found.findIndex((incident) => incident.number === chosen) >= INITIAL_CARDS;
  const shown = all || hidden ? found : found.slice(0, newest ?? INITIAL_CARDS);
  return (
    <>
      <ol className="incidents">
        {shown.map((incident, index) => (
          <li key={incident.number} id={`incident-${incident.number}`}>
            <Card
              incident={incident}
              open={incident.number === chosen || (chosen === null && (newest ? incident.closed_at === null : index === 0))}
              chosen={incident.number === chosen}
              ids={ids}
              onRank={onRank}
            />
          </li>
        ))}
      </ol>
      {!newest && shown.length < found.length && (
        <button type="button" className="button quiet tiny" onClick={() => setAll(true)}>
          All {found.length} incidents
        </button>
      )}
    </>
  );
}

function overlaps(incident: IncidentView, window: Window): boolean {
  const from = incident.signalled_at ?? incident.opened_at;
  return from <= window.until && (incident.closed_at ?? Infinity) >= window.since;
}

interface CardProps {
  incident: IncidentView;
  open: boolean;
  /** Scrolled to, as a link names it. */
  chosen: boolean;
  ids: NodeIdShortener;
  onRank: (rank: number) => void;
}

function Card({ incident, open, chosen, ids, onRank }: CardProps) {
  const [shown, setShown] = useState(open);
  const body = useId();
  useEffect(() => {
    if (open) setShown(true);
  }, [open]);
  const card = useRef<HTMLElement>(null);
  useEffect(() => {
    if (chosen) card.current?.scrollIntoView();
  }, [chosen]);
  const took = total(incident);
  const at = incident.signalled_at ?? incident.opened_at;
  return (
    <article ref={card} className={`incident card${isResize(incident) ? " resize" : ""}${incident.closed_at === null ? " open" : ""}`}>
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
              · attempt {incident.attempt} · {incident.decision ?? "no decision yet"}
              {incident.mesh_change && ` · ${changeText(incident.mesh_change)}`}
            </small>
          </span>
          <span className="incident-took">
            {isResize(incident) && <span className="tag resize">resize</span>}{" "}
            {incident.closed_at === null ? <span className="tag warn">open</span> : fineDuration(took)}
          </span>
          <PhaseStrip incident={incident} />
          <span className="chevron" aria-hidden="true" />
        </button>
      </h3>
      <div id={body} hidden={!shown}>
        {shown && <IncidentBody incident={incident} ids={ids} onRank={onRank} />}
      </div>
    </article>
  );
}

function PhaseStrip({ incident }: { incident: IncidentView }) {
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

function IncidentBody({ incident, ids, onRank }: Omit<CardProps, "open" | "chosen">) {
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
          {incident.mesh_change && (
            <Part name="Mesh">
              <p>
                {ARROWS[direction(incident.mesh_change)]} {changeText(incident.mesh_change)}{" "}
                <span className="second">
                  ({incident.mesh_change.ranks_before} → {incident.mesh_change.ranks_after} ranks)
                </span>
              </p>
            </Part>
          )}
          <Texts name={isResize(incident) ? "Reason" : "Evidence"} ids={ids} texts={incident.evidence} look="evidence" />
          <Texts name="Losses" ids={ids} texts={sentences(incident, "loss")} />
          {incident.suspects.length > 0 && (
            <Suspects suspects={incident.suspects} ids={ids} onRank={onRank} />
          )}
          <Texts name="Where it went on" ids={ids} texts={sentences(incident, "restore")} />
          <Texts name="End" ids={ids} texts={sentences(incident, "end")} />
        </div>
        <div>
          {(sentences(incident, "decision").length > 0 || incident.refused.length > 0 || incident.budget) && <Part name="Decision">
            {[...sentences(incident, "earlier"), ...sentences(incident, "decision")].map((text) => (
              <p key={text} className="decision">
                <ShortIds ids={ids} text={text} />
              </p>
            ))}
            {incident.refused.length > 0 && <RefusedAlternatives incident={incident} ids={ids} />}
            {incident.budget && <Budget incident={incident} />}
          </Part>}
          <Phases incident={incident} />
        </div>
      </div>
      {incident.stacks.length > 0 && <Stacks stacks={incident.stacks} onRank={onRank} />}
    </div>
  );
}

/** A text whose node ids are shortened; the title of a shortened id is the whole id. */
export function ShortIds({ ids, text }: { ids: NodeIdShortener; text: string }) {
  return ids.parts(text).map((part, index) =>
    part.full ? (
      <span key={index} title={part.full}>
        {part.text}
      </span>
    ) : (
      part.text
    ),
  );
}

interface TextsProps {
  ids: NodeIdShortener;
  texts: readonly string[];
  look?: "plain" | "evidence";
}

function Texts({ name, ...list }: TextsProps & { name: string }) {
  if (!list.texts.length) return null;
  return (
    <Part name={name}>
      <TextList {...list} />
    </Part>
  );
}

function TextList({ ids, texts, look = "plain" }: TextsProps) {
  return (
    <ul className={look}>
      {texts.map((text, index) => (
        <li key={index}>
          <ShortIds ids={ids} text={text} />
        </li>
      ))}
    </ul>
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

function RefusedAlternatives({ incident, ids }: { incident: IncidentView; ids: NodeIdShortener }) {
  const count = incident.refused.length;
  return (
    <details className="refused">
      <summary>{count === 1 ? "1 alternative refused" : `${count} alternatives refused`}</summary>
      <TextList ids={ids} texts={sentences(incident, "refused")} />
    </details>
  );
}

function Budget({ incident }: { incident: IncidentView }) {
  const budget = incident.budget!;
  const meters: [string, number, number][] = [
    ["failures", budget.failures, budget.max_failures],
    ["preemptions", budget.preemptions, budget.max_preemptions],
    ["attempts without a step", budget.without_progress, budget.max_without_progress],
  ];
  return (
    <ul className="budget" aria-label={`Budget used within ${fineDuration(budget.window_s)}`}>
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

function Phases({ incident }: { incident: IncidentView }) {
  const bars = phaseBars(incident.phases_s);
  if (!bars.length) return null;
  const took = total(incident);
  const sum = bars.reduce((all, bar) => all + bar.seconds, 0);
  return (
    <Part name={took === null ? "Phases" : `Phases, ${fineDuration(took)} in total`}>
      <div className="phase-bar" aria-hidden="true">
        {bars.map((bar) => (
          <i
            key={bar.name}
            title={`${bar.label} ${fineDuration(bar.seconds)}`}
            style={{ width: `${bar.share * 100}%`, background: `var(${KINDS[bar.kind].colour})` }}
          />
        ))}
      </div>
      <ul className="phases">
        {bars.map((bar) => (
          <li key={bar.name}>
            <Swatch look={KINDS[bar.kind]} />
            <span>{bar.label}</span>
            <b>{fineDuration(bar.seconds)}</b>
            <span className="dim">{finePercent(bar.seconds / sum, 0)}</span>
          </li>
        ))}
      </ul>
    </Part>
  );
}

interface SuspectsProps {
  suspects: IncidentView["suspects"];
  ids: NodeIdShortener;
  onRank: (rank: number) => void;
}

function Suspects({ suspects, ids, onRank }: SuspectsProps) {
  return (
    <Part name="Suspects">
      <ul className="suspects">
        {suspects.map((suspect, index) => (
          <li key={index}>
            <button type="button" className="link" onClick={() => onRank(suspect.rank)}>
              rank {suspect.rank}
            </button>
            <span className="score" title="suspicion score, 1 at most">
              <span className="bar" aria-hidden="true">
                <i style={{ width: `${Math.min(1, suspect.score) * 100}%` }} />
              </span>
              {compact(suspect.score, 2)}
            </span>
            <span className="reasons">
              <ShortIds ids={ids} text={suspect.reasons.join("; ")} />
            </span>
          </li>
        ))}
      </ul>
    </Part>
  );
}

function Stacks({ stacks, onRank }: { stacks: IncidentView["stacks"]; onRank: (rank: number) => void }) {
  return (
    <section className="part">
      <h4>Stacks of the ranks</h4>
      <div className="stacks">
        {stacks.map(({ ranks, frames }, index) => {
          return (
            <details key={index} open={index === 0}>
              <summary>
                <b>
                  {ranks.length > 1 && `${ranks.length} `}
                  {ranksText(ranks)}
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

/** A stack with the innermost frame first. */
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

/** The number of incidents in the interval. */
export function incidentsWithin(incidents: readonly IncidentView[], window: Window | null): number {
  return incidents.filter((incident) => within(incident.signalled_at ?? incident.opened_at, window)).length;
}
