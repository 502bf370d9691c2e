/** Chooses the files of the job's program, shows what is sent of them, and sends them. */

import { useEffect, useMemo, useRef } from "react";
import { bytes, count, plural } from "../../format";
import { Icon } from "../../ui/icons";
import { choices, largest, remark, sizeOf, unsent, type Bundle } from "./bundle";
import { ofInput } from "./choose";
import { ALWAYS_IGNORED, type LeftOut } from "./ignored";
import { isDigest, type Program } from "./specText";
import type { Code, Work } from "./useCode";

const SHOWN = 100;

export function CodeCard({ code }: { code: Code }) {
  const { program, bundle, work, stored, isPending } = code;
  const problem = code.failure ?? code.obstacle;
  const card = useRef<HTMLElement>(null);
  const isBusy = work !== null;
  useEffect(() => {
    // The button that had the focus is gone: the next Tab goes on from here.
    if (document.activeElement === document.body) card.current?.focus({ preventScroll: true });
  }, [isBusy, bundle]);
  return (
    <section ref={card} className="card code-card" aria-label="Code" tabIndex={-1}>
      <header>
        <h2 className="grow">Code</h2>
        {bundle && !work && (
          <button type="button" className="button quiet icon tiny" aria-label="Remove the chosen files" onClick={code.remove}>
            <Icon name="close" size={14} />
          </button>
        )}
      </header>
      <div className="body stack">
        {bundle ? <Chosen code={code} bundle={bundle} /> : <p className="second">{absent(program)}</p>}
        {problem && <p className="notice bad" role="alert"><Icon name="warning" /><span>{problem}</span></p>}
        {work ? (
          <Working work={work} stop={code.stop} />
        ) : (
          <>
            {bundle && stored && !isPending && (
              <p className="line is-running" role="status"><Icon name="check" /> Uploaded: {plural(stored.files, "file")}, {bytes(stored.bytes)} packed</p>
            )}
            {isPending && bundle && <SendButton code={code} />}
            <ChooseButtons code={code} />
          </>
        )}
      </div>
    </section>
  );
}

/** The button for what the spec lacks: to send what is chosen, or to choose. */
export function NextStep({ code }: { code: Code }) {
  return code.isPending ? <SendButton code={code} /> : <ChooseButtons code={code} />;
}

function SendButton({ code }: { code: Code }) {
  const files = code.bundle?.files ?? [];
  return (
    <button type="button" className="button" disabled={code.obstacle !== null} onClick={code.send}>
      Upload {plural(files.length, "file")}
    </button>
  );
}

function ChooseButtons({ code }: { code: Code }) {
  const files = useRef<HTMLInputElement>(null);
  const folder = useRef<HTMLInputElement>(null);
  const inputs = [[files, "Choose files…", {}], [folder, "Choose a folder…", { webkitdirectory: "" }]] as const;
  return (
    <div className="line wrap">
      {inputs.map(([input, label, more]) => (
        <span key={label}>
          <input ref={input} type="file" multiple hidden {...more} onChange={(event) => code.choose(ofInput(event.currentTarget))} />
          <button type="button" className="button" onClick={() => input.current?.click()}>{label}</button>
        </span>
      ))}
    </div>
  );
}

function Chosen({ code, bundle }: { code: Code; bundle: Bundle }) {
  const { program } = code;
  const size = useMemo(() => sizeOf(bundle.files), [bundle]);
  const [first] = useMemo(() => largest(bundle.files), [bundle]);
  const remarked = useMemo(() => program && remark(bundle, program, code.installs), [bundle, program, code.installs]);
  const hints = [unsent(bundle), code.obstacle ? null : remarked].filter((hint) => hint !== null);
  return (
    <>
      <p>
        <strong>{bundle.name}</strong>: {size}
        {first && bundle.files.length > 1 && <span className="second">; the largest is {first.path}, {bytes(first.bytes)}</span>}
      </p>
      {program ? <Start code={code} bundle={bundle} program={program} /> : (
        <p className="second">The spec starts none of them: write <code>script: train.py</code> or <code>function: train:main</code> into it.</p>
      )}
      {hints.map((hint) => <p key={hint} className="notice warn"><Icon name="warning" /><span>{hint}</span></p>)}
      <Left leftOut={bundle.leftOut} />
    </>
  );
}

/** The choice is in the text; this field reads it there and writes it. */
function Start({ code, bundle, program }: { code: Code; bundle: Bundle; program: Program }) {
  const offered = useMemo(() => choices(bundle, program), [bundle, program]);
  if (offered.length === 0) return null;
  const isOffered = offered.includes(program.entry);
  return (
    <label className="field">
      <span>{program.key === "script" ? "File to start" : "Function to call"}</span>
      <select className="input" value={program.entry} onChange={(event) => code.start(event.target.value)}>
        {!isOffered && <option value={program.entry}>{program.entry === "" ? "Choose…" : `As written: ${program.entry}`}</option>}
        {offered.map((entry) => <option key={entry}>{entry}</option>)}
      </select>
    </label>
  );
}

function Left({ leftOut }: { leftOut: readonly LeftOut[] }) {
  return (
    <details className="left-out">
      <summary>{leftOut.length === 0 ? "Nothing is left out" : `${plural(leftOut.length, "file or folder", "files and folders")} left out`}</summary>
      <ul>
        {leftOut.slice(0, SHOWN).map(({ path, by }) => (
          <li key={path}>
            <code>{path}</code> <span className="dim small">{by ?? "never sent"}</span>
          </li>
        ))}
      </ul>
      {leftOut.length > SHOWN && <p className="dim small">and {count(leftOut.length - SHOWN)} more</p>}
      <p className="dim small">Never sent: {ALWAYS_IGNORED.join(", ")}. The other rules are those of .gitignore and .holdfastignore in the folder.</p>
    </details>
  );
}

function Working({ work, stop }: { work: Work; stop: () => void }) {
  const share = work.of > 0 ? work.done / work.of : 0;
  return (
    <div className="stack">
      <div className="line">
        <span className="grow">{work.what}… {work.of > 0 && `${bytes(work.done)} of ${bytes(work.of)}`}</span>
        <button type="button" className="button tiny" onClick={stop}>Stop</button>
      </div>
      <div className="bar" role="progressbar" aria-label={work.what} aria-valuenow={Math.round(share * 100)} aria-valuemin={0} aria-valuemax={100}>
        <i style={{ width: `${share * 100}%` }} />
      </div>
    </div>
  );
}

function absent(program: Program | null): string {
  if (program && isDigest(program.code)) return `The spec names an earlier upload, ${program.code.slice(0, 15)}…. Choose files to send others.`;
  const needs = program?.key === "function" || program?.key === "ray_train" ? "the function" : program?.key === "recipe" ? "the recipe" : "the program";
  return program?.code === null && program.entry !== "" && program.key !== "script"
    ? `No files are sent: the nodes must have ${needs} already. Or choose the files that contain it.`
    : "Choose the file of your program, or its folder, or drop it on this page. It is sent to the server with the job.";
}
