/** The submit page: a spec as text, validated while it is typed. */

import { useEffect, useMemo, useRef, useState } from "react";
import { flushSync } from "react-dom";
import { useLocation } from "wouter";
import { ApiError, idempotencyKey, request, send, url } from "../api/client";
import type { JobView, ProblemFault } from "../api/types";
import { useJob, useResource } from "../data";
import { plural } from "../format";
import { useShortcuts } from "../keyboard/keys";
import { useFilters } from "../routing/router";
import { Icon } from "../ui/icons";
import { Failure } from "../ui/notice";
import { useToasts } from "../ui/toasts";
import { shifted } from "./caret";
import { CodeCard, NextStep } from "./code/CodeCard";
import { ofDrop } from "./code/choose";
import { isDigest } from "./code/specText";
import { useCode, type Code } from "./code/useCode";
import { Editor, type LocatedFault } from "./Editor";
import { locate, pathAt, placeOf } from "./locate";
import { withoutDefaults, withoutTokenSets, hintOf, type Document } from "./schema";
import { Summary } from "./Summary";
import { TEMPLATES } from "./templates";
import { bodyOf, useValidation, verdictOf, type Validation } from "./useValidation";
import { yaml } from "./write";
import "./submit.css";

const DRAFT = "holdfast.draft";

export default function SubmitPage() {
  const [params] = useFilters();
  const [, go] = useLocation();
  const from = params.get("from");
  const step = params.get("step");
  const [text, setText] = useState(() => (from ? "" : (sessionStorage.getItem(DRAFT) ?? TEMPLATES[0]?.text ?? "")));
  const schema = useResource("openapi", async (signal) => (await request(url("/openapi.json"), { signal })).json() as Promise<Document>);
  const origin = useJob(from);
  const input = useRef<HTMLTextAreaElement>(null);

  useEffect(() => {
    document.title = "Submit · Holdfast";
  }, []);
  const copied = useRef<string | null>(null);
  useEffect(() => {
    // Only once: both may be loaded again, and the edits since then must not be lost.
    if (!origin.value || !schema.value || copied.current === origin.value.id) return;
    copied.current = origin.value.id;
    setText(copyOf(origin.value, step, schema.value));
  }, [origin.value, step, schema.value]);
  useEffect(() => {
    if (!from && text !== "") sessionStorage.setItem(DRAFT, text);
  }, [from, text]);

  const verdict = useValidation(text);
  const sending = useSubmission(text, (job) => {
    sessionStorage.removeItem(DRAFT);
    go(`/jobs/${job.id}`);
  });
  const shown = sending.refused?.of === text ? sending.refused.verdict : verdict;
  const places = useMemo(() => locate(text), [text]);
  /** Changes the text while the user may be typing in it. */
  const edit = (changed: string) => {
    const field = input.current;
    if (!field) return setText(changed);
    const { value, selectionStart, selectionEnd, selectionDirection } = field;
    flushSync(() => setText(changed));
    field.setSelectionRange(shifted(selectionStart, value, changed), shifted(selectionEnd, value, changed), selectionDirection);
  };
  const code = useCode(text, edit);
  useDrops((transfer) => code.choose(ofDrop(transfer)));
  const folder = code.program && !isDigest(code.program.code) ? code.program.code : null;
  const faults = useMemo(() => locateFaults(shown, places, folder), [shown, places, folder]);
  const isCodeMissing = !code.work && !code.obstacle && (code.isPending || faults.some((fault) => fault.path === "code"));
  const [cursor, setCursor] = useState({ line: 0, column: 0 });
  const path = pathAt(places, cursor.line, cursor.column);
  const hint = path !== null && schema.value ? hintOf(schema.value, path) : null;
  useShortcuts("Submit", [{ keys: "/", label: "Focus the text (Ctrl+Enter submits)", run: () => input.current?.focus() }]);

  const jump = (fault: LocatedFault) => {
    const field = input.current;
    if (!field || !fault.place) return;
    const before = text.split("\n").slice(0, fault.place.line).reduce((sum, line) => sum + line.length + 1, 0);
    field.focus();
    field.setSelectionRange(before + fault.place.start, before + fault.place.end);
  };
  const ready = shown.state !== "faulty" && shown.state !== "unreadable" && text.trim() !== "" && !code.isPending && !code.work;

  return (
    <div className="page submit-page">
      <header>
        <h1>{from ? `From ${origin.value?.name ?? "…"}` : "Submit a job"}</h1>
        {from && step && <span className="tag accent">continues from step {step}</span>}
        <div className="actions">
          <label className="unseen" htmlFor="template">Start from an example</label>
          <select
            id="template" className="input template" value="" onChange={(event) => {
              const template = TEMPLATES[Number(event.target.value)];
              if (template) setText(template.text);
              if (from) go("/submit", { replace: true });
            }}
          >
            <option value="" disabled>Start from an example…</option>
            {TEMPLATES.map((template, index) => (
              <option key={template.name} value={index}>
                {template.name}: {template.summary}
              </option>
            ))}
          </select>
          <button type="button" className="button primary" disabled={!ready || sending.busy} onClick={() => void sending.submit()}>
            {sending.busy ? "Submitting…" : "Submit"}
          </button>
        </div>
      </header>
      {origin.error && <Failure error={origin.error} />}
      <div className="submit-parts">
        <section className="card editor-card" aria-label="Spec">
          <Editor text={text} faults={faults} onChange={setText} onCursor={(line, column) => setCursor({ line, column })} onSubmit={() => ready && void sending.submit()} input={input} />
          <footer className="hint small">
            {hint ? (
              <>
                <code>{hint.path}</code>
                <span className="tag">{hint.type}</span>
                {hint.default !== null && <span className="dim nowrap">default {hint.default}</span>}
                <span className="second cut">{hint.description || hint.keys.join(", ")}</span>
              </>
            ) : (
              <span className="dim">The field under the cursor is explained here.</span>
            )}
          </footer>
        </section>
        <aside className="stack">
          {(code.program || code.bundle) && <CodeCard code={code} />}
          <section className="card validation" id="spec-verdict" aria-live="polite" aria-label="Verdict">
            <VerdictHead verdict={shown} code={code} />
            {faults.length > 0 && (
              <ul>
                {faults.map((fault) => (
                  <li key={`${fault.path} ${fault.message}`}>
                    <button type="button" onClick={() => jump(fault)} disabled={!fault.place}>
                      {fault.path && <code>{fault.path}</code>}
                      <span>{fault.message}</span>
                      {fault.place && <span className="dim small nowrap">line {fault.place.line + 1}</span>}
                    </button>
                  </li>
                ))}
              </ul>
            )}
            {isCodeMissing && <div className="next-step"><NextStep code={code} /></div>}
          </section>
          {shown.state === "valid" && <Summary spec={shown.spec} />}
        </aside>
      </div>
    </div>
  );
}

function VerdictHead({ verdict, code }: { verdict: Validation; code: Code }) {
  switch (verdict.state) {
    case "valid":
      if (code.isPending) return <p className="validation-head is-recovering"><Icon name="warning" /> Valid, but the chosen files are not uploaded</p>;
      return <p className="validation-head is-running"><Icon name="check" /> Valid: ready to submit</p>;
    case "faulty":
      return <p className="validation-head is-failed"><Icon name="warning" /> {plural(verdict.faults.length, "fault")}</p>;
    case "unreadable":
      return <p className="validation-head is-failed"><Icon name="warning" /> The text cannot be parsed</p>;
    case "unchecked":
      return <p className="validation-head is-recovering"><Icon name="warning" /> Not checked: {verdict.why}</p>;
    default:
      return <p className="validation-head dim">Write a spec, or start from an example</p>;
  }
}

/** `folder`: what the text has as `code`, if it is no upload. The command line sends it; a page cannot. */
function locateFaults(verdict: Validation, places: ReturnType<typeof locate>, folder: string | null): LocatedFault[] {
  const messageOf = ({ path, message }: ProblemFault) =>
    path === "code" && folder !== null ? `"${folder}" is not an upload: choose the folder or file and upload it, or use the command line` : message;
  if (verdict.state === "faulty") return verdict.faults.map((fault) => ({ ...fault, message: messageOf(fault), place: placeOf(places, fault.path) }));
  if (verdict.state !== "unreadable") return [];
  const fault: ProblemFault = { path: "", message: verdict.why };
  const { line } = verdict;
  return [{ ...fault, place: line === null ? null : { path: "", line, start: 0, end: 999 } }];
}

/** The non-default part of the job's spec; with `step`, a job that continues from that checkpoint. */
function copyOf(job: JobView, step: string | null, schema: Document): string {
  const { name, init_from: _, ...rest } = withoutDefaults(schema, withoutTokenSets(job.spec as Record<string, unknown>));
  if (step === null) return `# A copy of ${job.name}; omitted fields have their defaults.\n${yaml({ name: job.spec["name"] ?? name, ...rest })}`;
  const spec = { name: `${String(name).slice(0, 50)}-from-${step}`, init_from: `${job.id}/${step}`, ...rest };
  return `# Continues from step ${step} of ${job.name}.\n${yaml(spec)}`;
}

/** Takes files that are dropped anywhere in the window. */
function useDrops(take: (transfer: DataTransfer) => void): void {
  const latest = useRef(take);
  latest.current = take;
  useEffect(() => {
    const onDrag = (event: DragEvent) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault(); // else the browser leaves the page for the file
      if (event.type === "drop") latest.current(event.dataTransfer);
    };
    const kinds = ["dragover", "drop"] as const;
    for (const kind of kinds) window.addEventListener(kind, onDrag);
    return () => kinds.forEach((kind) => window.removeEventListener(kind, onDrag));
  }, []);
}

interface Submission {
  busy: boolean;
  refused: { verdict: Validation; of: string } | null;
  submit: () => Promise<void>;
}

/** Uses an idempotency key per text: a text that is sent twice creates one job. */
function useSubmission(text: string, onDone: (job: JobView) => void): Submission {
  const { notify, fail } = useToasts();
  const [busy, setBusy] = useState(false);
  const [refused, setRefused] = useState<Submission["refused"]>(null);
  const key = useRef({ text: "", key: "" });
  const submit = async () => {
    if (key.current.text !== text) key.current = { text, key: idempotencyKey() };
    setBusy(true);
    try {
      const job = await send<JobView>("POST", "/jobs", { body: bodyOf(text), key: key.current.key });
      notify(`${job.name} is queued`);
      onDone(job);
    } catch (error) {
      fail(error);
      if (error instanceof ApiError) setRefused({ verdict: verdictOf(error), of: text });
    } finally {
      setBusy(false);
    }
  };
  return { busy, refused, submit };
}
