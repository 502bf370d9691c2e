/** The log view: all ranks merged, or a rank or attempt; with search, follow, pause, download. */

import { memo, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "react";

import { url } from "../../api/client";
import type { LogLineView } from "../../api/types";
import { VirtualList, type ListHandle } from "../../ui/VirtualList";
import type { Window } from "../axis";
import { clock, moment, whole } from "../format";
import { useDebounced } from "../hooks";
import { level, NO_FILTER, pieces, query, type LogFilter } from "./logBuffer";
import { useLogs } from "./useLogs";

const ROW = 20;
/** Pixels: the width of the columns before the text of a line, with the padding. */
const PREFIX_WIDTH = 190;

export interface LogChoice {
  rank: number | null;
  attempt: number | null;
  level: string | null;
  grep: string;
}

interface LogsProps {
  jobId: string;
  window: Window | null;
  choice: LogChoice;
  onChoice: (choice: LogChoice) => void;
  /** The attempts to choose from; empty: no choice is offered. */
  attempts: readonly number[];
  /** The view is bound to a rank, and offers no choice of the rank. */
  ofRank?: boolean;
  height?: number;
  live: boolean;
}

export function Logs({ jobId, window, choice, onChoice, attempts, ofRank = false, height = 440, live }: LogsProps) {
  const [text, setText] = useState(choice.grep);
  const grep = useDebounced(text, 250);
  const chosen = useRef({ choice, onChoice });
  chosen.current = { choice, onChoice };
  useEffect(() => setText(choice.grep), [choice.grep]);
  useEffect(() => {
    const now = chosen.current;
    if (grep !== now.choice.grep) now.onChoice({ ...now.choice, grep });
  }, [grep]);
  const filter = useMemo<LogFilter>(
    () => ({ ...NO_FILTER, ...choice, since: window?.since ?? null, until: window?.until ?? null }),
    [choice, window],
  );
  const [paused, setPaused] = useState(false);
  const [atEnd, setAtEnd] = useState(true);
  const list = useRef<ListHandle | null>(null);
  const { buffer, loading, error, missed, earlier, later, top, end } = useLogs(jobId, filter, paused);
  const follow = !paused && atEnd && !buffer.moreAfter;
  // Scrolled once the lines that were read for it are rendered.
  const [target, setTarget] = useState<{ toTop: boolean } | null>(null);
  useLayoutEffect(() => {
    if (target) list.current?.[target.toTop ? "toTop" : "toEnd"]();
  }, [target]);
  const scrollToTop = async () => {
    setAtEnd(false);
    await top();
    setTarget({ toTop: true });
  };
  const scrollToEnd = async () => {
    setPaused(false);
    if (buffer.moreAfter) await end();
    setAtEnd(true);
    setTarget({ toTop: false });
  };
  const lineNumber = useCallback((index: number) => buffer.lines[index]!.line, [buffer.lines]);
  // Computed from the number of characters: measuring the rows in the browser makes scrolling jerky.
  const longest = useMemo(() => buffer.lines.reduce((most, line) => Math.max(most, line.text.length), 0), [buffer.lines]);
  const unfiltered = !choice.grep && !choice.level && choice.rank === null && choice.attempt === null && !window;
  return (
    <div className="logs">
      <div className="tools">
        <input
          className="input grep"
          type="search"
          value={text}
          placeholder="Search: a regular expression"
          aria-label="Search the log, a regular expression"
          aria-invalid={error !== null}
          spellCheck={false}
          onChange={(event) => setText(event.target.value)}
        />
        <select
          className="input"
          aria-label="Level"
          value={choice.level ?? ""}
          onChange={(event) => onChoice({ ...choice, level: event.target.value || null })}
        >
          <option value="">All levels</option>
          <option value="error">Errors</option>
          <option value="warning">Warnings and worse</option>
          <option value="info">Info and worse</option>
        </select>
        {!ofRank && (
          <input
            className="input rank"
            inputMode="numeric"
            aria-label="Rank; empty: all ranks, merged"
            placeholder="All ranks"
            value={choice.rank ?? ""}
            onChange={(event) => {
              const number = event.target.value.trim();
              if (/^\d*$/.test(number)) onChoice({ ...choice, rank: number === "" ? null : Number(number) });
            }}
          />
        )}
        {attempts.length > 1 && (
          <select
            className="input"
            aria-label="Attempt"
            value={choice.attempt ?? ""}
            onChange={(event) =>
              onChoice({ ...choice, attempt: event.target.value ? Number(event.target.value) : null })
            }
          >
            <option value="">All attempts</option>
            {attempts.map((attempt) => (
              <option key={attempt} value={attempt}>
                Attempt {attempt}
              </option>
            ))}
          </select>
        )}
        <span className="grow" />
        {live && !window && (
          <button
            type="button"
            className="button tiny"
            aria-pressed={paused}
            onClick={() => (paused ? void scrollToEnd() : setPaused(true))}
          >
            {paused ? (missed > 0 ? `Resume, ${whole(missed)} new` : "Resume") : "Pause"}
          </button>
        )}
        <button type="button" className="button tiny" onClick={() => void scrollToTop()}>
          Top
        </button>
        <button type="button" className="button tiny" onClick={() => void scrollToEnd()}>
          End
        </button>
        <a className="button tiny" href={downloadUrl(jobId, query(filter), filter.until)} download>
          {unfiltered ? "Download" : "Download this view"}
        </a>
        {!unfiltered && (
          <a className="button tiny quiet" href={downloadUrl(jobId, new URLSearchParams(), null)} download>
            Download all
          </a>
        )}
      </div>
      {error && (
        <p className="notice bad" role="alert">
          {error}
        </p>
      )}
      <VirtualList
        ref={list}
        count={buffer.lines.length}
        keyOf={lineNumber}
        rowHeight={ROW}
        height={height}
        width={`calc(${longest}ch + ${PREFIX_WIDTH}px)`}
        label="Log lines"
        role="log"
        follow={follow}
        onNearTop={earlier}
        onNearEnd={() => buffer.moreAfter && later()}
        onEnd={setAtEnd}
        row={(index) => <LogRow line={buffer.lines[index]!} grep={choice.grep} ofRank={ofRank} />}
      />
      <p className="small dim logs-foot" aria-live="polite">
        {buffer.lines.length === 0
          ? loading
            ? "Loading …"
            : unfiltered ? "No line so far." : "No line matches."
          : `Lines ${whole(buffer.lines[0]!.line)} to ${whole(buffer.lines[buffer.lines.length - 1]!.line)}${
              buffer.before !== null ? "; scroll up for earlier lines" : ", from the first line"
            }${paused ? " · paused" : follow && live && !window ? " · following" : ""}`}
      </p>
    </div>
  );
}

function downloadUrl(jobId: string, params: URLSearchParams, until: number | null): string {
  const path = `/jobs/${encodeURIComponent(jobId)}/logs/download`;
  return url(path, { ...Object.fromEntries(params), until });
}

const MARKS = { error: "E", warning: "W", info: "", debug: "D" } as const;

export const LogRow = memo(function LogRow({ line, grep, ofRank }: { line: LogLineView; grep: string; ofRank: boolean }) {
  const found = level(line);
  return (
    <div className={`log-line ${found}`} style={{ height: ROW }}>
      <time title={moment(line.at)}>{clock(line.at, true)}</time>
      {!ofRank && (
        <span className="log-rank" title={`${line.worker}, attempt ${line.attempt}`}>
          {line.rank ?? line.agent}
        </span>
      )}
      <span className="log-level" title={found}>
        {MARKS[found]}
      </span>
      <span className="log-text">
        {pieces(line.text, grep).map((piece, index) =>
          piece.hit ? <mark key={index}>{piece.text}</mark> : piece.text,
        )}
      </span>
    </div>
  );
});
