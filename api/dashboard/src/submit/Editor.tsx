/** A text field with line numbers, syntax colours, and faults at their lines. The text is in an
 * ordinary textarea, so that editing behaves as usual; the coloured copy is behind it. */

import { memo, useRef, type KeyboardEvent } from "react";
import type { ProblemFault } from "../api/types";
import { tokens } from "./highlight";
import type { Place } from "./locate";

export interface LocatedFault extends ProblemFault {
  place: Place | null;
}

interface EditorProps {
  text: string;
  faults: readonly LocatedFault[];
  onChange: (text: string) => void;
  onCursor: (line: number, column: number) => void;
  onSubmit: () => void;
  input: React.RefObject<HTMLTextAreaElement | null>;
}

export function Editor({ text, faults, onChange, onCursor, onSubmit, input }: EditorProps) {
  const behind = useRef<HTMLDivElement>(null);
  const lines = text.split("\n");
  const marked = new Map<number, LocatedFault[]>();
  for (const fault of faults) {
    const line = fault.place?.line ?? 0;
    marked.set(line, [...(marked.get(line) ?? []), fault]);
  }
  const cursor = () => {
    const field = input.current;
    if (!field) return;
    const before = field.value.slice(0, field.selectionStart).split("\n");
    onCursor(before.length - 1, before.at(-1)?.length ?? 0);
  };
  return (
    <div className="editor">
      <div className="editor-behind" ref={behind} aria-hidden="true">
        {lines.map((line, index) => (
          <EditorLine key={index} number={index + 1} text={line} faults={marked.get(index)} />
        ))}
      </div>
      <textarea
        ref={input} className="editor-text" aria-label="Spec" aria-describedby="spec-verdict" aria-invalid={faults.length > 0} spellCheck={false} autoCapitalize="off" autoCorrect="off" wrap="off" value={text}
        onChange={(event) => {
          onChange(event.target.value);
          cursor();
        }}
        onSelect={cursor}
        onScroll={(event) => {
          if (!behind.current) return;
          behind.current.style.transform = `translate(${-event.currentTarget.scrollLeft}px, ${-event.currentTarget.scrollTop}px)`;
        }}
        onKeyDown={(event) => onKey(event, onSubmit)}
      />
    </div>
  );
}

/** Ctrl+Enter submits; Enter keeps the indentation. Tab leaves the field, as everywhere. */
function onKey(event: KeyboardEvent<HTMLTextAreaElement>, onSubmit: () => void): void {
  if (event.key !== "Enter") return;
  if (event.ctrlKey || event.metaKey) {
    event.preventDefault();
    onSubmit();
    return;
  }
  const { value, selectionStart } = event.currentTarget;
  const line = value.slice(value.lastIndexOf("\n", selectionStart - 1) + 1, selectionStart);
  const indent = (/^ */.exec(line)?.[0] ?? "") + (/^[^#]*:\s*$/.test(line) ? "  " : "");
  if (indent === "") return;
  event.preventDefault();
  document.execCommand("insertText", false, `\n${indent}`); // keeps the undo history
}

const EditorLine = memo(function EditorLine({ number, text, faults }: { number: number; text: string; faults: LocatedFault[] | undefined }) {
  const spans = faults?.flatMap(({ place }) => (place ? [[place.start, place.end] as const] : [])) ?? [];
  let at = 0;
  return (
    <div className={`editor-line${faults ? " faulty" : ""}`}>
      <span className="editor-number">{number}</span>
      {tokens(text).map((token, index) => {
        const begins = at;
        at += token.text.length;
        const wrong = spans.some(([start, end]) => begins < end && at > start) && token.text.trim() !== "";
        return (
          <span key={index} className={`tok-${token.kind}${wrong ? " wrong" : ""}`}>
            {token.text}
          </span>
        );
      })}
      {"\u200b"}
    </div>
  );
}, (before, after) => before.text === after.text && before.number === after.number && JSON.stringify(before.faults) === JSON.stringify(after.faults));
