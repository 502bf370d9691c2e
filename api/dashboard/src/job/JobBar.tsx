/** The sticky bar: links to the sections of the page, and the brushed interval. */

import { useEffect, useState } from "react";

import type { Window } from "./axis";
import { clock, fineDuration } from "./format";

export const SECTIONS = [
  ["time", "Time"],
  ["ranks", "Ranks"],
  ["charts", "Charts"],
  ["incidents", "Incidents"],
  ["logs", "Log"],
  ["checkpoints", "Checkpoints"],
  ["events", "Events"],
  ["spec", "Spec"],
] as const;

export function JobBar({ brush, onClear }: { brush: Window | null; onClear: () => void }) {
  const here = useSectionInView();
  return (
    <div className="job-bar">
      <nav aria-label="Sections of this page">
        {SECTIONS.map(([part, name]) => (
          <a key={part} href={`#${part}`} aria-current={here === part ? "true" : undefined}
            onClick={(event) => {
              event.preventDefault();
              document.getElementById(part)?.scrollIntoView();
            }}>
            {name}
          </a>
        ))}
      </nav>
      {brush && (
        <p className="brush-chip" role="status">
          <span>
            {clock(brush.since)} – {clock(brush.until)} <small>{fineDuration(brush.until - brush.since)}</small>
          </span>
          <button type="button" className="link" onClick={onClear}>
            Show all
          </button>
        </p>
      )}
    </div>
  );
}

function useSectionInView(): string {
  const [here, setHere] = useState("time");
  useEffect(() => {
    const seen = new Map<string, number>();
    const watch = new IntersectionObserver(
      (entries) => {
        for (const entry of entries) {
          seen.set(entry.target.id, entry.isIntersecting ? entry.intersectionRect.height : 0);
        }
        const first = SECTIONS.find(([part]) => (seen.get(part) ?? 0) > 40);
        if (first) setHere(first[0]);
      },
      { rootMargin: "-60px 0px -40% 0px", threshold: [0, 0.1, 0.5, 1] },
    );
    for (const [part] of SECTIONS) {
      const element = document.getElementById(part);
      if (element) watch.observe(element);
    }
    return () => watch.disconnect();
  }, []);
  return here;
}
