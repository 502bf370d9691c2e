/** The sources of a job: how much each has, and how often the steps so far have read it. */

import type { JobView } from "../api/types";
import { count, figure, NONE, number, shortened, short } from "../format";
import { Section } from "./Section";

/** Characters of a path; two lines of a phone. */
const MOST_OF_PATH = 48;

export function Sources({ job }: { job: JobView }) {
  if (!job.reads) return null;
  const { sources, tokenizer } = job.reads;
  const weighted = sources.some(({ weight }) => weight != null);
  return (
    <Section id="sources" name="Sources" note={tokenizer} count={sources.length}>
      <table className="table sources">
        <thead>
          <tr>
            <th scope="col">Source</th>
            {weighted && <th scope="col" className="right">Weight</th>}
            <th scope="col" className="right">Tokens</th>
            <th scope="col" className="right">Seen</th>
            <th scope="col" className="right">Epoch</th>
          </tr>
        </thead>
        <tbody>
          {sources.map(({ path, weight, tokens, tokens_seen: seen, epochs }, at) => (
            <tr key={at}>
              <td title={path}>{shortened(path, MOST_OF_PATH)}</td>
              {weighted && <td className="right">{number(weight)}</td>}
              <td className="right" title={count(tokens)}>{short(tokens)}</td>
              <td className="right" title={count(seen)}>{short(seen)}</td>
              <td className="right">{epochs == null ? NONE : epochs < 1000 ? epochs.toFixed(2) : figure(epochs)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Section>
  );
}
