/** The code of the job that is being written: chosen, packed, uploaded, and named in the spec. */

import { useEffect, useMemo, useRef, useState } from "react";
import type { CodeView } from "../../api/types";
import { obstacle, proposal, type Bundle } from "./bundle";
import type { Reading, Selection } from "./choose";
import { pack, sparing } from "./pack";
import { namesPackages, programOf, withCode, withEntry, type Program } from "./specText";
import { reason, upload } from "./upload";

/** What is being done with the chosen files. */
export interface Work {
  what: "Reading" | "Packing" | "Uploading";
  done: number;
  of: number;
}

export interface Code {
  /** What the text starts; null: a built-in recipe. */
  program: Program | null;
  /** The text names packages for the nodes. */
  installs: boolean;
  bundle: Bundle | null;
  work: Work | null;
  /** The chosen files at the server. */
  stored: CodeView | null;
  /** Files are chosen that the spec does not name. */
  isPending: boolean;
  /** Why the chosen files cannot be uploaded. */
  obstacle: string | null;
  /** Why the last thing that was tried failed. */
  failure: string | null;
  choose: (read: Reading | null) => void;
  remove: () => void;
  start: (entry: string) => void;
  send: () => void;
  stop: () => void;
}

const UNWRITTEN = "cannot be written into the text as it is: mend the text";

/** `edit` replaces the text. */
export function useCode(text: string, edit: (text: string) => void): Code {
  const [selection, setSelection] = useState<Selection | null>(null);
  const [work, setWork] = useState<Work | null>(null);
  const [stored, setStored] = useState<CodeView | null>(null);
  const [failure, setFailure] = useState<string | null>(null);
  const now = useRef(text);
  now.current = text;
  const turn = useRef<AbortController | null>(null);
  useEffect(() => () => turn.current?.abort(), []);
  const held = useRef<Program | null>(null); // while the text is between two readable ones
  const program = useMemo(() => {
    const found = programOf(text);
    if (found !== undefined) held.current = found;
    return held.current;
  }, [text]);
  const bundle = selection?.bundle ?? null;

  const change = (changed: string | null, what: string): void => {
    if (changed === null) setFailure(`${what} ${UNWRITTEN}.`);
    else if (changed !== now.current) edit(changed);
  };
  /** Ends what is under way; what follows is of this turn. */
  const begin = (next: Work | null): AbortSignal => {
    turn.current?.abort();
    turn.current = new AbortController();
    setFailure(null);
    setWork(next);
    return turn.current.signal;
  };
  const attempt = async (signal: AbortSignal, todo: () => Promise<void>): Promise<void> => {
    try {
      await todo();
    } catch (error) {
      if (!signal.aborted) setFailure(reason(error));
    } finally {
      if (!signal.aborted) setWork(null);
    }
  };

  const choose = (read: Reading | null): void => {
    if (!read) return;
    const signal = begin({ what: "Reading", done: 0, of: 0 });
    void attempt(signal, async () => {
      const next = await read(signal);
      if (signal.aborted) return;
      setSelection(next);
      setStored(null);
      const present = programOf(now.current);
      const entry = present && proposal(next.bundle, present);
      if (present && entry) change(withEntry(now.current, present.key, entry), `${present.key}: ${entry}`);
    });
  };
  const send = (): void => {
    if (!selection) return;
    const signal = begin({ what: "Packing", done: 0, of: 0 });
    const report = (what: Work["what"]) => sparing((done, of) => {
      if (!signal.aborted) setWork({ what, done, of });
    });
    void attempt(signal, async () => {
      const content = await pack(selection.bundle.name, selection.chosen, report("Packing"), signal);
      const view = await upload(content, report("Uploading"), signal);
      setStored(view);
      // Unless the text is now that of a built-in recipe, which has no code.
      if (programOf(now.current) !== null) change(withCode(now.current, view.code), `Uploaded, but code: ${view.code}`);
    });
  };

  return {
    program, bundle, work, stored,
    installs: useMemo(() => namesPackages(text), [text]),
    isPending: bundle !== null && program !== null && (stored === null || program.code !== stored.code),
    obstacle: useMemo(() => bundle && obstacle(bundle, program), [bundle, program]),
    failure,
    choose,
    remove: () => {
      begin(null);
      setSelection(null);
      setStored(null);
    },
    start: (entry) => program && change(withEntry(text, program.key, entry), `${program.key}: ${entry}`),
    send,
    stop: () => void begin(null),
  };
}
