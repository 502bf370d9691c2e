/** The frame of a section of the page, and the placeholder for content that is not loaded yet. */

import type { ReactNode } from "react";

interface SectionProps {
  id: string;
  name: string;
  note?: string;
  count?: number | undefined;
  tools?: ReactNode;
  children: ReactNode;
}

export function Section({ id, name, note, count, tools, children }: SectionProps) {
  return (
    <section className="job-section card" id={id} aria-labelledby={`${id}-name`}>
      <header>
        <h2 id={`${id}-name`}>
          {name}
          {count !== undefined && <span className="count">{count}</span>}
        </h2>
        {note && <p className="small dim">{note}</p>}
        <span className="grow" />
        {tools}
      </header>
      <div className="body">{children}</div>
    </section>
  );
}

export const Placeholder = ({ height }: { height: number }) => <div className="ghost" style={{ height }} aria-busy="true" />;

export function Toggle<T extends string>({
  label,
  value,
  options,
  onChange,
}: {
  label: string;
  value: T;
  options: readonly (readonly [T, string])[];
  onChange: (value: T) => void;
}) {
  return (
    <div className="toggle" role="group" aria-label={label}>
      {options.map(([option, name]) => (
        <button key={option} type="button" aria-pressed={option === value} onClick={() => onChange(option)}>
          {name}
        </button>
      ))}
    </div>
  );
}
