/** The spec with its defaults filled in, and in what another job's differs. */

import { useMemo, useState } from "react";

import { get } from "../api/client";
import { useResource } from "../data";
import { useLater, useSaveText } from "./hooks";
import { direction, lines, matching, written, yaml } from "./specTree";
import type { SpecDifference } from "./views";

interface Props {
  jobId: string;
  name: string;
  spec: Record<string, unknown>;
  against: string;
  onAgainst: (other: string) => void;
}

export function SpecView({ jobId, name, spec, against, onAgainst }: Props) {
  const [wanted, setWanted] = useState("");
  const all = useMemo(() => lines(spec), [spec]);
  const found = useMemo(() => matching(all, wanted), [all, wanted]);
  const save = useSaveText();
  return (
    <div className="spec">
      <div>
        <div className="tools">
          <input
            className="input grep"
            type="search"
            value={wanted}
            placeholder="Find a field"
            aria-label="Find a field of the spec"
            onChange={(event) => setWanted(event.target.value)}
          />
          <span className="grow" />
          <button type="button" className="button tiny" onClick={() => save(`${name}.yaml`, yaml(spec))}>
            Download YAML
          </button>
        </div>
        <div className="spec-lines" tabIndex={0} role="region" aria-label="Spec, defaults filled in">
          {found.map((line) => (
            <div key={line.path} className={line.value === null ? "section" : ""} style={{ paddingLeft: 12 + line.depth * 16 }}>
              <span className="spec-key">{line.key}:</span>{" "}
              {line.value !== null && <span className={line.value === "null" ? "dim" : "spec-value"}>{line.value}</span>}
            </div>
          ))}
          {!found.length && <p className="dim">No field has that.</p>}
        </div>
      </div>
      <Difference jobId={jobId} against={against} onAgainst={onAgainst} />
    </div>
  );
}

interface Candidate {
  id: string;
  name: string;
}

function Difference({ jobId, against, onAgainst }: Pick<Props, "jobId" | "against" | "onAgainst">) {
  const [text, setText] = useState("");
  const sought = useLater(text.trim(), 200);
  const candidates = useResource<{ rows: Candidate[] }>(`jobs like ${sought}`, (signal) =>
    get("/jobs", { view: "row", q: sought, limit: 8 }, signal),
  );
  const difference = useResource<SpecDifference[]>(against ? `diff ${jobId} ${against}` : null, (signal) =>
    get(`/jobs/${encodeURIComponent(jobId)}/spec/diff`, { against }, signal),
  );
  const others = (candidates.value?.rows ?? []).filter((one) => one.id !== jobId);
  return (
    <div className="spec-diff">
      <div className="tools">
        <input
          className="input grep"
          type="search"
          value={text}
          placeholder="Compare with: name or id of another job"
          aria-label="Compare with another job, by name or id"
          onChange={(event) => setText(event.target.value)}
        />
      </div>
      {!against || text ? (
        <ul className="plain candidates" aria-label="Jobs to compare with">
          {others.map((one) => (
            <li key={one.id}>
              <button
                type="button"
                className="link"
                onClick={() => {
                  setText("");
                  onAgainst(one.id);
                }}
              >
                {one.name}
              </button>{" "}
              <code className="dim">{one.id.slice(0, 13)}</code>
            </li>
          ))}
          {!others.length && <li className="dim">No other job.</li>}
        </ul>
      ) : (
        <p className="small">
          Against <code>{against}</code>{" "}
          <button type="button" className="link" onClick={() => onAgainst("")}>
            another
          </button>
        </p>
      )}
      {against && difference.error && <p className="notice bad" role="alert">{difference.error.message}</p>}
      {against && difference.value && !text && <Differences found={difference.value} />}
    </div>
  );
}

function Differences({ found }: { found: readonly SpecDifference[] }) {
  if (!found.length) return <p className="nothing">The two specs are the same.</p>;
  return (
    <div className="scroll-x" tabIndex={0} role="region" aria-label="Differences">
      <table className="table difference">
        <thead>
          <tr>
            <th scope="col">Field</th>
            <th scope="col">This job</th>
            <th scope="col">The other</th>
          </tr>
        </thead>
        <tbody>
          {found.map((one) => (
            <tr key={one.path} title={direction(one)}>
              <th scope="row">
                <code>{one.path}</code>
              </th>
              <td>
                <del>{written(one.left)}</del>
              </td>
              <td>
                <ins>{written(one.right)}</ins>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
