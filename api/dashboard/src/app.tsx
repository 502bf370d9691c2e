/** The root component: chooses the view of a path. Views are loaded on first use. */

import { Component, lazy, Suspense, useEffect, type ReactNode } from "react";
import { DataProvider } from "./data/context";
import type { Live } from "./data/live";
import { KeysProvider } from "./keyboard/keys";
import { Link, RouterProvider, useRouter } from "./routing/router";
import { Shell } from "./shell";
import { ToastProvider } from "./ui/toasts";

const JobsPage = lazy(() => import("./jobs/JobsPage"));
const JobPage = lazy(() => import("./job/JobPage"));
const CheckpointsPage = lazy(() => import("./checkpoints/CheckpointsPage"));
const ClusterPage = lazy(() => import("./cluster/ClusterPage"));
const SubmitPage = lazy(() => import("./submit/SubmitPage"));

export function App({ live }: { live: Live }) {
  return (
    <RouterProvider>
      <DataProvider live={live}>
        <KeysProvider>
          <ToastProvider>
            <Shell>
              <View />
            </Shell>
          </ToastProvider>
        </KeysProvider>
      </DataProvider>
    </RouterProvider>
  );
}

function View() {
  const { path, go } = useRouter();
  useEffect(() => {
    if (path === "/") go("/jobs", { replace: true });
  }, [path, go]);
  return (
    <ErrorBoundary key={path}>
      <Suspense fallback={<div className="page" aria-busy="true" />}>{viewOf(path)}</Suspense>
    </ErrorBoundary>
  );
}

function viewOf(path: string): ReactNode {
  const [first, id, part, ...more] = path.split("/").filter(Boolean).map(decode);
  if (more.length === 0 && first === "jobs") {
    if (id === undefined) return <JobsPage />;
    if (part === undefined) return <JobPage id={id} />;
    if (part === "checkpoints") return <CheckpointsPage id={id} />;
  }
  if (id === undefined && first === undefined) return null;
  if (id === undefined && first === "cluster") return <ClusterPage />;
  if (id === undefined && first === "submit") return <SubmitPage />;
  return <NotFound />;
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function NotFound() {
  return (
    <div className="page">
      <div className="empty">
        <h1>Page not found</h1>
        <Link to="/jobs">All jobs</Link>
      </div>
    </div>
  );
}

/** Shows the error of a failed view inside the intact frame. */
class ErrorBoundary extends Component<{ children: ReactNode }, { error: Error | null }> {
  override state = { error: null as Error | null };

  static getDerivedStateFromError(error: Error) {
    return { error };
  }

  override render() {
    const { error } = this.state;
    if (!error) return this.props.children;
    return (
      <div className="page">
        <div className="empty" role="alert">
          <h1>This view failed</h1>
          <p>{error.message}</p>
          <button type="button" className="button" onClick={() => location.reload()}>
            Reload
          </button>
        </div>
      </div>
    );
  }
}
