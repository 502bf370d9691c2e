/**
 * The time ribbon: the job's time by kind, as high as its world is large, with attempts, incidents and
 * checkpoints. An interval
 * brushed on the ribbon filters the sections below it. For the keyboard, the two ends of the brush
 * are sliders.
 */

import { useEffect, useId, useMemo, useRef, useState, type KeyboardEvent, type PointerEvent } from "react";

import type { SpanKind, TimelineView } from "../api/types";
import { ticks, timeScale, type Window } from "./axis";
import { useCursor } from "./cursor";
import { clock, fineDuration, moment, finePercent } from "./format";
import { useWidth } from "./hooks";
import { humanize, KIND_ORDER, KINDS, look, type KindLook } from "./incidents/kinds";
import { attemptBands, bars, marks, secondsByKind, spanAt } from "./ribbonLayout";
import { ARROWS, changeText, direction, hasResizes, meshText, sizeText, worldAt, worldSteps } from "./worldLayout";
import { WorldLegend, WorldSlider } from "./WorldSizes";

const ATTEMPTS = 18;
const BARS_AT = 22;
const BARS = 34;
const INCIDENTS_AT = BARS_AT + BARS + 4;
const CHECKPOINTS_AT = INCIDENTS_AT + 26;
const HEIGHT = CHECKPOINTS_AT + 14 + 20;

interface RibbonProps {
  timeline: TimelineView;
  brush: Window | null;
  onBrush: (brush: Window | null) => void;
  onIncident: (number: number) => void;
}

export function Ribbon({ timeline, brush, onBrush, onIncident }: RibbonProps) {
  const [box, width] = useWidth<HTMLDivElement>();
  const whole = useMemo<Window>(
    () => ({ since: timeline.since, until: Math.max(timeline.until, timeline.since + 1e-3) }),
    [timeline.since, timeline.until],
  );
  return (
    <div className="ribbon">
      <Legend timeline={timeline} window={brush ?? whole} />
      <WorldLegend timeline={timeline} window={brush ?? whole} />
      <div className="ribbon-box" ref={box} style={{ height: HEIGHT }}>
        {width > 0 && (
          <>
            <Drawing timeline={timeline} window={whole} width={width} />
            <PointerLayer
              timeline={timeline}
              window={whole}
              width={width}
              brush={brush}
              onBrush={onBrush}
            />
            <WorldSlider timeline={timeline} window={whole} width={width} onBrush={onBrush} />
            <Incidents timeline={timeline} window={whole} width={width} onIncident={onIncident} />
          </>
        )}
      </div>
    </div>
  );
}

function Legend({ timeline, window }: { timeline: TimelineView; window: Window }) {
  const sums = secondsByKind(timeline.spans, window);
  const all = [...sums.values()].reduce((sum, seconds) => sum + seconds, 0);
  return (
    <ul className="legend" aria-label="Time by kind">
      {KIND_ORDER.filter((kind) => (sums.get(kind) ?? 0) > 0).map((kind) => (
        <li key={kind} title={KINDS[kind].means}>
          <Swatch look={KINDS[kind]} />
          <span className="legend-name">{KINDS[kind].label}</span>
          <span className="legend-time">{fineDuration(sums.get(kind))}</span>
          <span className="legend-share">{finePercent((sums.get(kind) ?? 0) / all)}</span>
        </li>
      ))}
    </ul>
  );
}

export function Swatch({ look }: { look: KindLook }) {
  const id = useId();
  return (
    <svg className="swatch" width="16" height="12" aria-hidden="true">
      <defs>
        <Hatch id={id} hatch={look.hatch} />
      </defs>
      <rect width="16" height="12" rx="2.5" style={{ fill: `var(${look.colour})` }} />
      {look.hatch !== "none" && <rect width="16" height="12" rx="2.5" fill={`url(#${id})`} />}
    </svg>
  );
}

/** Lines or dots over a colour, to distinguish the kinds without colour. */
function Hatch({ id, hatch }: { id: string; hatch: KindLook["hatch"] }) {
  return (
    <pattern id={id} width="6" height="6" patternUnits="userSpaceOnUse">
      {(hatch === "rising" || hatch === "cross") && (
        <path className="hatch" d="M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2" />
      )}
      {(hatch === "falling" || hatch === "cross") && (
        <path className="hatch" d="M-1,5 l2,2 M0,0 l6,6 M5,-1 l2,2" />
      )}
      {hatch === "dots" && <circle className="hatch-dot" cx="3" cy="3" r="0.9" />}
    </pattern>
  );
}

interface Layer {
  timeline: TimelineView;
  window: Window;
  width: number;
}

function Drawing({ timeline, window, width }: Layer) {
  const id = useId();
  const shapes = useMemo(() => bars(timeline.spans, window, width), [timeline, window, width]);
  const bands = useMemo(
    () => attemptBands(timeline.spans, window, width),
    [timeline, window, width],
  );
  const saved = useMemo(
    () => marks(timeline.checkpoints, window, width, 5),
    [timeline, window, width],
  );
  const steps = useMemo(() => worldSteps(timeline.worlds, window, width), [timeline, window, width]);
  const axis = ticks(window, width);
  const scale = timeScale(window, width);
  const hatched = KIND_ORDER.filter((kind) => KINDS[kind].hatch !== "none");
  return (
    <svg className="ribbon-drawing" width={width} height={HEIGHT} aria-hidden="true">
      <defs>
        {hatched.map((kind) => (
          <Hatch key={kind} id={`${id}${kind}`} hatch={KINDS[kind].hatch} />
        ))}
        <clipPath id={`${id}clip`}>
          {steps.map((step) => (
            <rect
              key={step.x}
              x={step.x}
              y={BARS_AT + BARS * (1 - step.height)}
              width={step.width}
              height={BARS * step.height}
              rx={steps.length === 1 ? 5 : 0}
            />
          ))}
        </clipPath>
      </defs>
      {bands.map((band, index) => (
        <g key={band.attempt}>
          <line className="attempt-line" x1={band.x + 0.5} x2={band.x + 0.5} y1={2} y2={BARS_AT - 1} />
          {roomForLabel(bands, index) && (
            <text className="attempt-label" x={band.x + 5} y={ATTEMPTS - 5}>
              {band.width > 70 ? `attempt ${band.attempt}` : band.attempt}
            </text>
          )}
        </g>
      ))}
      <rect className="ribbon-ground" x="0" y={BARS_AT} width={width} height={BARS} rx="5" />
      <g clipPath={`url(#${id}clip)`}>
        {shapes.map((bar, index) => (
          <g key={index}>
            <rect
              x={bar.x}
              y={BARS_AT}
              width={bar.width}
              height={BARS}
              style={{ fill: `var(${look(bar.span.kind).colour})` }}
            />
            {look(bar.span.kind).hatch !== "none" && bar.width > 4 && (
              <rect
                x={bar.x}
                y={BARS_AT}
                width={bar.width}
                height={BARS}
                fill={`url(#${id}${bar.span.kind})`}
              />
            )}
          </g>
        ))}
      </g>
      {saved.map((mark) => (
        <path
          key={mark.x}
          className={mark.items.some((checkpoint) => checkpoint.tier === "remote") ? "saved remote" : "saved"}
          d={`M${mark.x},${CHECKPOINTS_AT} l4,5 l-4,5 l-4,-5 z`}
        />
      ))}
      <line className="axis-line" x1="0" x2={width} y1={CHECKPOINTS_AT + 14.5} y2={CHECKPOINTS_AT + 14.5} />
      {axis.map((tick) => (
        <g key={tick.at}>
          <line
            className="axis-line"
            x1={scale(tick.at)}
            x2={scale(tick.at)}
            y1={CHECKPOINTS_AT + 14}
            y2={CHECKPOINTS_AT + 18}
          />
          <text
            className="axis-label"
            x={Math.min(Math.max(scale(tick.at), 16), width - 16)}
            y={HEIGHT - 4}
            textAnchor="middle"
          >
            {tick.label}
          </text>
        </g>
      ))}
    </svg>
  );
}

function roomForLabel(bands: readonly { x: number; width: number }[], index: number): boolean {
  const next = bands[index + 1];
  return !next || next.x - bands[index]!.x > 18;
}

/** The input layer of the ribbon: hover, brush and its two ends. */
function PointerLayer({
  timeline,
  window,
  width,
  brush,
  onBrush,
}: Layer & { brush: Window | null; onBrush: (brush: Window | null) => void }) {
  const cursor = useCursor();
  const scale = timeScale(window, width);
  const drag = useRef<{ from: number; move: Window | null } | null>(null);
  const [drawn, setDrawn] = useState<Window | null>(null);
  const [hover, setHover] = useState<number | null>(null);
  useEffect(() => cursor.listen((at, from) => from !== "ribbon" && setHover(at)), [cursor]);
  const shown = drawn ?? brush;

  const place = (event: PointerEvent) => {
    const box = event.currentTarget.getBoundingClientRect();
    return scale.invert(Math.min(Math.max(event.clientX - box.left, 0), width));
  };
  const down = (event: PointerEvent) => {
    if (event.button !== 0) return;
    const at = place(event);
    const inside = brush !== null && at > brush.since && at < brush.until;
    drag.current = { from: at, move: inside ? brush : null };
    event.currentTarget.setPointerCapture(event.pointerId);
  };
  const move = (event: PointerEvent) => {
    const at = place(event);
    setHover(at);
    cursor.set(at, "ribbon");
    if (drag.current) setDrawn(dragged(drag.current, at, window));
  };
  const up = (event: PointerEvent) => {
    const began = drag.current;
    drag.current = null;
    setDrawn(null);
    if (!began) return;
    const at = place(event);
    const far = Math.abs(scale(at) - scale(began.from)) > 3;
    if (far) onBrush(dragged(began, at, window));
    else if (brush && !began.move) onBrush(null);
  };
  const leave = () => {
    setHover(null);
    cursor.set(null, "ribbon");
  };
  return (
    <>
      <div
        className="ribbon-plot"
        onPointerDown={down}
        onPointerMove={move}
        onPointerUp={up}
        onPointerCancel={() => ((drag.current = null), setDrawn(null))}
        onPointerLeave={leave}
        onDoubleClick={() => onBrush(null)}
      />
      {shown && (
        <>
          <div className="brush-out" style={{ left: 0, width: Math.max(0, scale(shown.since)) }} />
          <div className="brush-out" style={{ left: scale(shown.until), right: 0 }} />
        </>
      )}
      <BrushEnd which="since" brush={shown} window={window} width={width} onBrush={onBrush} />
      <BrushEnd which="until" brush={shown} window={window} width={width} onBrush={onBrush} />
      {hover !== null && <Hover timeline={timeline} at={hover} x={scale(hover)} width={width} />}
    </>
  );
}

function dragged(began: { from: number; move: Window | null }, at: number, window: Window): Window {
  if (!began.move) return { since: Math.min(began.from, at), until: Math.max(began.from, at) };
  const length = began.move.until - began.move.since;
  const since = Math.min(
    Math.max(began.move.since + at - began.from, window.since),
    window.until - length,
  );
  return { since, until: since + length };
}

interface BrushEndProps {
  which: "since" | "until";
  brush: Window | null;
  window: Window;
  width: number;
  onBrush: (brush: Window | null) => void;
}

/** One end of the brush: a slider. */
function BrushEnd({ which, brush, window, width, onBrush }: BrushEndProps) {
  const scale = timeScale(window, width);
  const ends = brush ?? window;
  const at = ends[which];
  const grabbed = useRef(false);
  const moveTo = (wanted: number) => {
    const least = (window.until - window.since) / 500;
    const since = which === "since" ? Math.min(wanted, ends.until - least) : ends.since;
    const until = which === "until" ? Math.max(wanted, ends.since + least) : ends.until;
    const next = { since: Math.max(since, window.since), until: Math.min(until, window.until) };
    const all = next.since <= window.since && next.until >= window.until;
    onBrush(all ? null : next);
  };
  const key = (event: KeyboardEvent) => {
    const length = window.until - window.since;
    const step = length * (event.shiftKey ? 0.05 : 0.01);
    const to: Record<string, number> = {
      ArrowLeft: at - step,
      ArrowDown: at - step,
      ArrowRight: at + step,
      ArrowUp: at + step,
      Home: window.since,
      End: window.until,
    };
    if (event.key === "Escape" && brush) onBrush(null);
    else if (event.key in to) moveTo(to[event.key]!);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return (
    <div
      className={`brush-end ${brush ? "set" : ""} ${which}`}
      style={{ left: scale(at) }}
      role="slider"
      tabIndex={0}
      aria-label={which === "since" ? "Show from" : "Show until"}
      aria-valuemin={Math.round(window.since)}
      aria-valuemax={Math.round(window.until)}
      aria-valuenow={Math.round(at)}
      aria-valuetext={moment(at)}
      onKeyDown={key}
      onPointerDown={(event) => {
        grabbed.current = true;
        event.currentTarget.setPointerCapture(event.pointerId);
      }}
      onPointerMove={(event) => {
        if (!grabbed.current) return;
        const box = event.currentTarget.parentElement!.getBoundingClientRect();
        moveTo(scale.invert(event.clientX - box.left));
      }}
      onPointerUp={() => (grabbed.current = false)}
    />
  );
}

function Hover({
  timeline,
  at,
  x,
  width,
}: {
  timeline: TimelineView;
  at: number;
  x: number;
  width: number;
}) {
  const span = spanAt(timeline, at);
  const world = hasResizes(timeline.worlds) ? worldAt(timeline.worlds, at) : null;
  const side = x > width / 2 ? { right: width - x + 10 } : { left: x + 10 };
  return (
    <>
      <div className="ribbon-cursor" style={{ left: x }} />
      <div className="tip ribbon-tip" style={side} aria-hidden="true">
        <b>{clock(at)}</b>
        {span && (
          <>
            <span className="tip-line">
              <Swatch look={look(span.kind)} /> {KINDS[span.kind as SpanKind]?.label ?? span.kind} for{" "}
              {fineDuration(span.until - span.since)}
            </span>
            <span className="tip-line quiet">
              {span.attempt ? `attempt ${span.attempt}` : "no attempt"}
              {span.incident ? ` · incident ${span.incident}` : ""}
            </span>
          </>
        )}
        {world && (
          <span className="tip-line">
            {sizeText(world)} <span className="quiet">{meshText(world.mesh)}</span>
          </span>
        )}
      </div>
    </>
  );
}

function Incidents({ timeline, window, width, onIncident }: Layer & { onIncident: (n: number) => void }) {
  const found = useMemo(
    () => marks(timeline.incidents, window, width, 20),
    [timeline, window, width],
  );
  return (
    <>
      {found.map((mark) => {
        const newest = mark.items[mark.items.length - 1]!;
        const open = mark.items.some((incident) => incident.closed_at === null);
        const resize = mark.items.every((incident) => incident.cause === "resize");
        const numbers = mark.items.map((incident) => incident.number);
        const change = newest.mesh_change;
        const label =
          mark.items.length === 1
            ? `Incident ${newest.number}: ${humanize(newest.cause)}, ${newest.decision ?? "no decision yet"}` +
              (change ? `, ${changeText(change)}` : "")
            : `Incidents ${numbers[0]} to ${newest.number}`;
        return (
          <button
            key={numbers[0]}
            type="button"
            className={`incident-mark${resize ? " resize" : ""}${open ? " open" : ""}`}
            style={{ left: Math.min(Math.max(mark.x, 9), width - 9), top: INCIDENTS_AT }}
            title={label}
            aria-label={label}
            onClick={() => onIncident(newest.number)}
          >
            {mark.items.length === 1 ? newest.number : `${mark.items.length}×`}
            {mark.items.length === 1 && change && <span className="mark-arrow">{ARROWS[direction(change)]}</span>}
          </button>
        );
      })}
    </>
  );
}
