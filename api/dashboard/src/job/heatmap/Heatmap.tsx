/**
 * The rank × time heatmap on a canvas. Only the rows in view are painted, each from an image with
 * one pixel per value, so a thousand ranks scroll as fast as ten. Keyboard: the arrow keys move a
 * cell, Enter opens its rank.
 */

import {
  useCallback,
  useEffect,
  useId,
  useMemo,
  useRef,
  useState,
  type KeyboardEvent,
  type MouseEvent,
  type PointerEvent,
  type RefObject,
} from "react";

import type { RankMeasure } from "../../api/types";
import { colorOf, useTheme } from "../../theme/theme";
import { useCursor } from "../cursor";
import { plural } from "../../format";
import { clock, compact, fineDuration, ranges } from "../format";
import {
  domain,
  layout,
  medians,
  peerRatios,
  pixels,
  ramp,
  rgb,
  rowAt,
  SLOW,
  slowness,
  type Domain,
  type Layout,
  type Order,
  type Row,
} from "./heat";
import { useWidth } from "../hooks";
import type { RankHistory } from "../views";

interface HeatmapProps {
  history: RankHistory;
  of: RankMeasure;
  order: Order;
  only?: (rank: number, node: string) => boolean;
  onOpen: (rank: number) => void;
}

interface Cell {
  /** Position in `layout.rankRows`. */
  row: number;
  bucket: number;
}

const MAX_HEIGHT = 430;
const MAP_WIDTH = 40;

export function Heatmap({ history, of, order, only, onOpen }: HeatmapProps) {
  const [box, width] = useWidth<HTMLDivElement>();
  const { dark } = useTheme();
  const middle = useMemo(() => medians(history), [history]);
  const ratios = useMemo(() => peerRatios(history), [history]);
  const slow = useMemo(() => slowness(history, of, ratios), [history, of, ratios]);
  const gutter = width < 560 ? 84 : 96;
  const sizes = useMemo(() => {
    const many = history.ranks.length > 96;
    return { rank: many ? 11 : 16, node: many ? 18 : 22, gap: 5 };
  }, [history.ranks.length]);
  const plan = useMemo(
    () => layout(history, slow, order, sizes, only),
    [history, slow, order, sizes, only],
  );
  const scale = useMemo(() => domain(history, of), [history, of]);
  const [cell, setCell] = useState<Cell | null>(null);
  const [keyed, setKeyed] = useState(false);
  const height = Math.min(MAX_HEIGHT, plan.height);
  const overflows = plan.height > height;
  const plot = Math.max(20, width - gutter - (overflows ? MAP_WIDTH + 22 : 2));
  const { buckets } = history;

  const scroll = useRef<HTMLDivElement | null>(null);
  const canvas = useRef<HTMLCanvasElement | null>(null);
  const map = useRef<HTMLCanvasElement | null>(null);
  const cursor = useCursor();
  const colours = useMemo(() => palette(dark), [dark]);
  const image = useMemo(() => paintValues(history, scale, colours.table), [history, scale, colours]);
  const mapImage = useRef<MapImage | null>(null);

  const paint = useRef<() => void>(() => {});
  paint.current = () => {
    if (!canvas.current || !scroll.current || width === 0) return;
    const top = scroll.current.scrollTop;
    draw(canvas.current, { width: width - (overflows ? MAP_WIDTH + 20 : 0), height, top, gutter, plot, plan, image, colours, history, cell, at: cursor.at });
    if (!map.current) return;
    const all = { height, plan, image, colours };
    if (!mapImage.current || !sameInputs(mapImage.current.inputs, all)) {
      mapImage.current = { inputs: all, canvas: drawAllRanks(all) };
    }
    drawMap(map.current, mapImage.current.canvas, { ...all, top });
  };
  const frame = useRef(0);
  const schedulePaint = useCallback(() => {
    cancelAnimationFrame(frame.current);
    frame.current = requestAnimationFrame(() => paint.current());
  }, []);
  useEffect(() => schedulePaint(), [schedulePaint, width, height, plan, image, colours, cell]);
  useEffect(() => cursor.listen(schedulePaint), [cursor, schedulePaint]);
  useEffect(() => () => cancelAnimationFrame(frame.current), []);

  const cellAt = (event: MouseEvent): Cell | null => {
    const area = event.currentTarget.getBoundingClientRect();
    const y = event.clientY - area.top + (scroll.current?.scrollTop ?? 0);
    const row = plan.rows[rowAt(plan.rows, y)];
    if (!row || row.kind !== "rank" || y < row.y) return null;
    const x = event.clientX - area.left - gutter;
    const bucket = Math.min(buckets - 1, Math.max(0, Math.floor((x / plot) * buckets)));
    return { row: plan.rankRows.findIndex((index) => plan.rows[index] === row), bucket };
  };
  const timeOf = (bucket: number) => history.since + (bucket + 0.5) * history.bucket_s;
  const point = (next: Cell | null, byKey: boolean) => {
    setKeyed(byKey);
    setCell((old) => (old?.row === next?.row && old?.bucket === next?.bucket ? old : next));
    cursor.set(next ? timeOf(next.bucket) : null, "heatmap");
  };
  const key = (event: KeyboardEvent) => {
    const from = cell ?? { row: 0, bucket: Math.max(0, middle.findLastIndex((value) => !Number.isNaN(value))) };
    const last = plan.rankRows.length - 1;
    const page = Math.max(1, Math.floor(height / sizes.rank) - 2);
    const far = event.shiftKey ? 10 : 1;
    const to: Record<string, Cell> = {
      ArrowDown: { ...from, row: cell ? from.row + far : 0 },
      ArrowUp: { ...from, row: from.row - far },
      ArrowRight: { ...from, bucket: from.bucket + far },
      ArrowLeft: { ...from, bucket: from.bucket - far },
      PageDown: { ...from, row: from.row + page },
      PageUp: { ...from, row: from.row - page },
      Home: { ...from, row: 0 },
      End: { ...from, row: last },
    };
    if ((event.key === "Enter" || event.key === " ") && cell) {
      onOpen(rankOf(plan, cell));
    } else if (to[event.key] && last >= 0) {
      const wanted = to[event.key]!;
      const next = { row: clamp(wanted.row, last), bucket: clamp(wanted.bucket, buckets - 1) };
      point(next, true);
      reveal(scroll.current, plan, next, height);
    } else if (event.key === "Escape" && cell) point(null, true);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };

  const id = useId();
  const shown = cell ? describeCell(history, plan, cell, of, ratios) : null;
  return (
    <div className="heat" ref={box}>
      <HeatScale scale={scale} of={of} table={colours.table} />
      <div className="heat-frame" style={{ height }}>
        <div
          className="heat-scroll"
          ref={scroll}
          style={{ height }}
          role="listbox"
          tabIndex={0}
          aria-label={`Ranks by ${LABELS[of]}, ${order === "stragglers" ? "slowest first" : "in order"}. Arrow keys move, Enter opens a rank.`}
          aria-activedescendant={cell ? id : undefined}
          onScroll={schedulePaint}
          onKeyDown={key}
          onPointerMove={(event) => point(cellAt(event), false)}
          onPointerLeave={() => !keyed && point(null, false)}
          onClick={(event) => {
            const hit = cellAt(event);
            if (hit) onOpen(rankOf(plan, hit));
          }}
        >
          <canvas className="heat-canvas" ref={canvas} aria-hidden="true" />
          <div style={{ height: Math.max(0, plan.height - height) }} />
          <span
            className="unseen"
            role="option"
            id={id}
            aria-selected={cell !== null}
            aria-posinset={cell ? cell.row + 1 : 1}
            aria-setsize={Math.max(1, plan.rankRows.length)}
          >
            {shown?.text ?? "no cell"}
          </span>
        </div>
        {overflows && <Overview map={map} scroll={scroll} height={height} total={plan.height} />}
      </div>
      <p className="heat-cell" aria-live="polite">
        {shown ? (
          <>
            <b>rank {shown.rank}</b>
            <span>{shown.node}</span>
            <span>{shown.when}</span>
            <span>{shown.value}</span>
            {shown.factor && <span className={shown.slow ? "slow" : ""}>{shown.factor}</span>}
          </>
        ) : (
          <span className="dim">
            {plural(history.ranks.length, "rank")} on {plural(new Set(history.ranks.map((rank) => rank.node)).size, "node")} ·{" "}
            a cell covers {fineDuration(history.bucket_s)} · point at a cell, or use the arrow keys
          </span>
        )}
      </p>
    </div>
  );
}

export const LABELS: Record<RankMeasure, string> = {
  compute_s: "compute time",
  step_s: "step time",
  lag: "lag behind the fastest rank",
};

const clamp = (value: number, most: number) => Math.max(0, Math.min(most, value));

function rankOf(plan: Layout, cell: Cell): number {
  const row = plan.rows[plan.rankRows[cell.row]!];
  return row?.kind === "rank" ? row.rank : 0;
}

function reveal(scroll: HTMLDivElement | null, plan: Layout, cell: Cell, height: number): void {
  const row = plan.rows[plan.rankRows[cell.row]!];
  if (!scroll || !row) return;
  const above = 24;
  if (row.y - above < scroll.scrollTop) scroll.scrollTop = row.y - above;
  else if (row.y + row.height + 4 > scroll.scrollTop + height) {
    scroll.scrollTop = row.y + row.height + 4 - height;
  }
}

function describeCell(
  history: RankHistory,
  plan: Layout,
  cell: Cell,
  of: RankMeasure,
  ratios: Float32Array,
) {
  const row = plan.rows[plan.rankRows[cell.row]!];
  if (row?.kind !== "rank") return null;
  const at = row.index * history.buckets + cell.bucket;
  const value = known(history.values[at]);
  const ratio = of === "lag" ? null : known(ratios[at]);
  const when = clock(history.since + cell.bucket * history.bucket_s);
  const shown = value === null ? "not measured" : fineDuration(value);
  const factor = ratio === null ? null : `${compact(ratio, 3)}× its peers`;
  return {
    rank: row.rank,
    node: row.node || "unknown node",
    when,
    value: shown,
    factor,
    slow: row.slow !== null && ratio !== null && ratio >= SLOW,
    text: `rank ${row.rank} on ${row.node}, ${when}: ${shown}${factor ? `, ${factor}` : ""}`,
  };
}

const known = (value: number | undefined) => (value === undefined || Number.isNaN(value) ? null : value);

/** The legend of the colours. */
function HeatScale({ scale, of, table }: { scale: Domain; of: RankMeasure; table: Uint8ClampedArray }) {
  const bar = useRef<HTMLCanvasElement | null>(null);
  useEffect(() => {
    const context = bar.current?.getContext("2d");
    if (!context) return;
    for (let i = 0; i < 128; i++) {
      const at = Math.round((i / 127) * 255) * 3;
      context.fillStyle = `rgb(${table[at]}, ${table[at + 1]}, ${table[at + 2]})`;
      context.fillRect(i, 0, 1, 8);
    }
  }, [table]);
  return (
    <div className="heat-scale">
      <span>{fineDuration(scale.low)}</span>
      <canvas ref={bar} width={128} height={8} aria-hidden="true" />
      <span>{fineDuration(scale.high)} and more</span>
      <span className="heat-none" aria-hidden="true" />
      <span>no step</span>
      <span className="unseen">colours show the {LABELS[of]}</span>
    </div>
  );
}

/** A map of all ranks beside the scroll bar; a click scrolls to that place. */
function Overview({
  map,
  scroll,
  height,
  total,
}: {
  map: RefObject<HTMLCanvasElement | null>;
  scroll: RefObject<HTMLDivElement | null>;
  height: number;
  total: number;
}) {
  const go = (event: PointerEvent) => {
    const list = scroll.current;
    if (!list || (event.type === "pointermove" && event.buttons !== 1)) return;
    const area = event.currentTarget.getBoundingClientRect();
    list.scrollTop = ((event.clientY - area.top) / height) * total - height / 2;
  };
  return (
    <canvas
      className="heat-map"
      ref={map}
      style={{ width: MAP_WIDTH, height }}
      aria-hidden="true"
      onPointerDown={(event) => (event.currentTarget.setPointerCapture(event.pointerId), go(event))}
      onPointerMove={go}
    />
  );
}

interface Palette {
  table: Uint8ClampedArray;
  text: string;
  dim: string;
  line: string;
  warn: string;
  accent: string;
  empty: string;
  font: string;
}

function palette(_dark: boolean): Palette {
  const stops = ["--heat-1", "--heat-2", "--heat-3", "--heat-4", "--heat-5"];
  return {
    table: ramp(stops.map((name) => rgb(colorOf(name)))),
    text: colorOf("--text"),
    dim: colorOf("--text-3"),
    line: colorOf("--line"),
    warn: colorOf("--recovering"),
    accent: colorOf("--accent"),
    empty: colorOf("--heat-empty"),
    font: getComputedStyle(document.body).fontFamily,
  };
}

/** An image with one pixel per value; drawing stretches it. */
function paintValues(history: RankHistory, scale: Domain, table: Uint8ClampedArray): HTMLCanvasElement {
  const image = document.createElement("canvas");
  image.width = Math.max(1, history.buckets);
  image.height = Math.max(1, history.ranks.length);
  if (history.values.length) {
    const bytes = pixels(history.values, scale, table);
    image.getContext("2d")?.putImageData(new ImageData(bytes, image.width, image.height), 0, 0);
  }
  return image;
}

/** The context of a canvas of that size in CSS pixels, at the resolution of the screen. */
function sizedContext(canvas: HTMLCanvasElement, width: number, height: number) {
  const ratio = Math.min(3, devicePixelRatio || 1);
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d")!;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

interface Scene {
  width: number;
  height: number;
  top: number;
  gutter: number;
  plot: number;
  plan: Layout;
  image: HTMLCanvasElement;
  colours: Palette;
  history: RankHistory;
  cell: Cell | null;
  at: number | null;
}

function draw(canvas: HTMLCanvasElement, scene: Scene): void {
  const { width, height, top, gutter, plot, plan, colours, history } = scene;
  const context = sizedContext(canvas, width, height);
  context.imageSmoothingEnabled = false;
  context.textBaseline = "middle";
  for (let i = rowAt(plan.rows, top); i < plan.rows.length; i++) {
    const row = plan.rows[i]!;
    const y = row.y - top;
    if (y > height) break;
    if (row.kind === "node") drawNode(context, row, y, scene);
    else drawRank(context, row, y, scene);
  }
  const at = scene.at;
  if (at !== null && at >= history.since && at <= history.until) {
    const x = gutter + ((at - history.since) / (history.until - history.since)) * plot;
    context.fillStyle = colours.text;
    context.globalAlpha = 0.55;
    context.fillRect(Math.round(x), 0, 1, height);
    context.globalAlpha = 1;
  }
}

function drawNode(
  context: CanvasRenderingContext2D,
  row: Extract<Row, { kind: "node" }>,
  y: number,
  { colours, gutter, plot }: Scene,
): void {
  const middle = y + row.height / 2 + 1;
  context.font = `600 11px ${colours.font}`;
  context.fillStyle = colours.text;
  const name = truncate(context, row.node || "unknown node", gutter + plot * 0.5);
  context.fillText(name, 0, middle);
  const after = context.measureText(name).width + 8;
  context.font = `400 11px ${colours.font}`;
  context.fillStyle = colours.dim;
  const ranks = `ranks ${ranges(row.ranks, 3)}`;
  context.fillText(ranks, after, middle);
  if (row.slow !== null) {
    const x = after + context.measureText(ranks).width + 8;
    context.fillStyle = colours.warn;
    context.font = `600 11px ${colours.font}`;
    context.fillText(`▲ ${compact(row.slow, 3)}×`, x, middle);
  }
}

function drawRank(
  context: CanvasRenderingContext2D,
  row: Extract<Row, { kind: "rank" }>,
  y: number,
  { colours, gutter, plot, image, plan, cell, history }: Scene,
): void {
  const tall = row.height - 1;
  context.fillStyle = colours.empty;
  context.fillRect(gutter, y, plot, tall);
  context.drawImage(image, 0, row.index, image.width, 1, gutter, y, plot, tall);
  const chosen = cell !== null && plan.rows[plan.rankRows[cell.row]!] === row;
  const slow = row.slow !== null;
  context.font = `${slow || chosen ? 600 : 400} ${Math.min(11, row.height - 1)}px ${colours.font}`;
  context.fillStyle = chosen ? colours.accent : slow ? colours.warn : colours.dim;
  context.textAlign = "right";
  const label = row.slow !== null ? `▲ ${compact(row.slow, 2)}×  ${row.rank}` : String(row.rank);
  context.fillText(label, gutter - 7, y + tall / 2 + 0.5);
  context.textAlign = "left";
  if (!chosen) return;
  context.strokeStyle = colours.accent;
  context.lineWidth = 1.5;
  context.strokeRect(gutter - 0.5, y - 0.5, plot + 1, tall + 1);
  const step = plot / Math.max(1, history.buckets);
  context.strokeStyle = colours.text;
  context.strokeRect(gutter + cell!.bucket * step - 1, y - 1.5, Math.max(4, step + 2), tall + 3);
}

type AllRanks = Pick<Scene, "height" | "plan" | "image" | "colours">;

/** The drawn map, reused while its inputs stay the same. */
interface MapImage {
  inputs: AllRanks;
  canvas: HTMLCanvasElement;
}

const sameInputs = (inputs: AllRanks, others: AllRanks) =>
  (Object.keys(inputs) as (keyof AllRanks)[]).every((key) => inputs[key] === others[key]);

function drawAllRanks({ height, plan, image, colours }: AllRanks): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  const context = sizedContext(canvas, MAP_WIDTH, height);
  const scale = height / plan.height;
  context.fillStyle = colours.empty;
  context.fillRect(0, 0, MAP_WIDTH, height);
  const marks: Row[] = [];
  for (const at of plan.rankRows) {
    const row = plan.rows[at]!;
    if (row.kind !== "rank") continue;
    if (row.slow !== null) marks.push(row);
    context.drawImage(image, 0, row.index, image.width, 1, 0, row.y * scale, MAP_WIDTH, Math.max(0.6, row.height * scale));
  }
  context.fillStyle = colours.warn;
  for (const row of marks) {
    context.fillRect(MAP_WIDTH - 9, row.y * scale, 9, Math.max(2, row.height * scale));
  }
  return canvas;
}

function drawMap(canvas: HTMLCanvasElement, ranks: HTMLCanvasElement, scene: AllRanks & { top: number }): void {
  const { height, top, plan, colours } = scene;
  const context = sizedContext(canvas, MAP_WIDTH, height);
  const scale = height / plan.height;
  context.drawImage(ranks, 0, 0, MAP_WIDTH, height);
  context.strokeStyle = colours.accent;
  context.lineWidth = 1.5;
  context.strokeRect(0.75, top * scale + 0.75, MAP_WIDTH - 1.5, Math.max(6, height * scale - 1.5));
}

function truncate(context: CanvasRenderingContext2D, text: string, width: number): string {
  if (context.measureText(text).width <= width) return text;
  let cut = text;
  while (cut.length > 3 && context.measureText(`${cut}…`).width > width) cut = cut.slice(0, -1);
  return `${cut}…`;
}

