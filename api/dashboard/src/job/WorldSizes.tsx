/** The size of the world on the ribbon: its legend, and a slider that steps through the sizes. */

import { useState, type KeyboardEvent } from "react";

import type { TimelineView } from "../api/types";
import { timeScale, type Window } from "./axis";
import { useCursor } from "./cursor";
import { clock, fineDuration } from "./format";
import { hasResizes, meshText, sizeText, timeByWorld } from "./worldLayout";

/** The time on each mesh; nothing for a job with one mesh. */
export function WorldLegend({ timeline, window }: { timeline: TimelineView; window: Window }) {
  if (!hasResizes(timeline.worlds)) return null;
  const most = Math.max(...timeline.worlds.map((world) => world.world_size));
  return (
    <ul className="legend worlds" aria-label="Time by size of the world">
      {timeByWorld(timeline.worlds, window).map(({ world, seconds }) => (
        <li key={meshText(world.mesh)} title="The height of the ribbon is the number of ranks.">
          <svg className="swatch" width="16" height="12" aria-hidden="true">
            <rect className="world-ground" width="16" height="12" rx="2.5" />
            <rect className="world-bar" y={12 * (1 - world.world_size / most)} width="16" height={(12 * world.world_size) / most} />
          </svg>
          <span className="legend-name">{sizeText(world)}</span>
          <span className="legend-time">{fineDuration(seconds)}</span>
          <span className="legend-share">{meshText(world.mesh)}</span>
        </li>
      ))}
    </ul>
  );
}

interface WorldSliderProps {
  timeline: TimelineView;
  window: Window;
  width: number;
  onBrush: (brush: Window | null) => void;
}

/** For the keyboard: arrows step through the periods with one mesh, Enter selects the period. The
 * pointer reaches the ribbon below it. */
export function WorldSlider({ timeline, window, width, onBrush }: WorldSliderProps) {
  const cursor = useCursor();
  const scale = timeScale(window, width);
  const { worlds } = timeline;
  const [chosen, setChosen] = useState<number | null>(null);
  if (!hasResizes(worlds)) return null;
  const place = Math.min(chosen ?? worlds.length - 1, worlds.length - 1);
  const world = worlds[place]!;
  const show = (next: number) => {
    const to = worlds[next]!;
    setChosen(next);
    cursor.set((to.since + to.until) / 2, "world");
  };
  const key = (event: KeyboardEvent) => {
    const to: Record<string, number> = {
      ArrowLeft: place - 1,
      ArrowDown: place - 1,
      ArrowRight: place + 1,
      ArrowUp: place + 1,
      Home: 0,
      End: worlds.length - 1,
    };
    if (event.key === "Escape") onBrush(null);
    else if (event.key === "Enter") onBrush({ since: world.since, until: world.until });
    else if (event.key in to) show(Math.min(Math.max(to[event.key]!, 0), worlds.length - 1));
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return (
    <div
      className="world-slider"
      style={{ left: scale(world.since), width: Math.max(3, scale(world.until) - scale(world.since)) }}
      role="slider"
      tabIndex={0}
      aria-label="Size of the world"
      aria-valuemin={1}
      aria-valuemax={worlds.length}
      aria-valuenow={place + 1}
      aria-valuetext={`${sizeText(world)}, ${meshText(world.mesh)}, from ${clock(world.since)} for ${fineDuration(world.until - world.since)}`}
      onFocus={() => show(place)}
      onBlur={() => cursor.set(null, "world")}
      onKeyDown={key}
    />
  );
}
