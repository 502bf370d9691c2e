/** In place of a view that does not exist: what was asked for, and the ways back. */

import { useEffect, type ReactNode } from "react";
import { Link } from "wouter";

export function Missing({ title, children }: { title: string; children: ReactNode }) {
  useEffect(() => {
    document.title = `${title} · Holdfast`;
  }, [title]);
  return (
    <div className="page">
      <div className="empty">
        <h1>{title}</h1>
        <p>{children}</p>
        <div className="line wrap">
          <Link to="/jobs" className="button primary">
            All jobs
          </Link>
          <button type="button" className="button" onClick={() => history.back()}>
            Back
          </button>
        </div>
      </div>
    </div>
  );
}

export const PageNotFound = () => (
  <Missing title="Page not found">
    Nothing is at <code>{location.pathname}</code>.
  </Missing>
);
