/** The spec including the default values, and its differences from the spec of another job. */

import { useMemo, useState } from "react";

import { get } from "../api/client";
import type { SpecDifferencePage, SpecDifferenceView } from "../api/types";
import { useResource } from "../data";
import { useDebounced, useSaveText } from "./hooks";
import { direction, lines, matching, toYaml, specYaml } from "./specTree";

interface SpecViewProps {
  jobId: string;
  name: string;
  spec: Record<string, unknown>;
  against: string;
  onAgainst: (other: string) => void;
}

export function SpecView({ jobId, name, spec, against, onAgainst }: SpecViewProps) {
  const [filter, setFilter] = useState("");
  const all = useMemo(() => lines(spec), [spec]);
  const found = useMemo(() => matching(all, filter), [all, filter]);
  const save = useSaveText();
  return (
    <div className="spec">
      <div>
        <div className="tools">
          <input
            className="input grep"
            type="search"
            value={filter}
            placeholder="Find a field"
            aria-label="Find a field of the spec"
            onChange={(event) => setFilter(event.target.value)}
          />
          <span className="grow" />
          <button type="button" className="button tiny" onClick={() => save(`${name}.yaml`, specYaml(spec))}>
            Download YAML
          </button>
        </div>
        <div className="spec-lines" tabIndex={0} role="region" aria-label="Spec, including the default values">
          {found.map((line) => (
            <div key={line.path} className={line.value === null ? "section" : ""} style={{ paddingLeft: 12 + line.depth * 16 }}>
              <span className="spec-key">{line.key}:</span>{" "}
              {line.value !== null && <span className={line.value === "null" ? "dim" : "spec-value"}>{line.value}</span>}
            </div>
          ))}
          {!found.length && <p className="dim">No field matches.</p>}
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

function Difference({ jobId, against, onAgainst }: Pick<SpecViewProps, "jobId" | "against" | "onAgainst">) {
  const [text, setText] = useState("");
  const search = useDebounced(text.trim(), 200);
  const candidates = useResource<{ items: Candidate[] }>(`jobs like ${search}`, (signal) =>
    get("/jobs", { q: search, limit: 8 }, signal),
  );
  const difference = useResource<SpecDifferencePage>(against ? `diff ${jobId} ${against}` : null, (signal) =>
    get(`/jobs/${encodeURIComponent(jobId)}/spec/diff`, { against }, signal),
  );
  const others = (candidates.value?.items ?? []).filter((job) => job.id !== jobId);
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
          {others.map((job) => (
            <li key={job.id}>
              <button
                type="button"
                className="link"
                onClick={() => {
                  setText("");
                  onAgainst(job.id);
                }}
              >
                {job.name}
              </button>{" "}
              <code className="dim">{job.id.slice(0, 13)}</code>
            </li>
          ))}
          {!others.length && <li className="dim">No other job.</li>}
        </ul>
      ) : (
        <p className="small">
          Compared with <code>{against}</code>{" "}
          <button type="button" className="link" onClick={() => onAgainst("")}>
            Choose another job
          </button>
        </p>
      )}
      {against && difference.error && <p className="notice bad" role="alert">{difference.error.message}</p>}
      {against && difference.value && !text && <Differences found={difference.value.items} />}
    </div>
  );
}

function Differences({ found }: { found: readonly SpecDifferenceView[] }) {
  if (!found.length) return <p className="nothing">The two specs are the same.</p>;
  return (
    <div className="scroll-x" tabIndex={0} role="region" aria-label="Differences">
      <table className="table difference">
        <thead>
          <tr>
            <th scope="col">Field</th>
            <th scope="col">This job</th>
            <th scope="col">Other job</th>
          </tr>
        </thead>
        <tbody>
          {found.map((difference) => (
            <tr key={difference.path} title={direction(difference)}>
              <th scope="row">
                <code>{difference.path}</code>
              </th>
              <td>
                <del>{toYaml(difference.left)}</del>
              </td>
              <td>
                <ins>{toYaml(difference.right)}</ins>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
