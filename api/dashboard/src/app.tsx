/** The root component: chooses the view of a path. Views are loaded on first use. */

import { lazy, Suspense, useSyncExternalStore, type ReactNode } from "react";
import { Redirect, Route, Switch, useLocation } from "wouter";
import { onRefused, refused } from "./api/session";
import { DataProvider, jobOf } from "./data/context";
import type { Live } from "./data/live";
import { KeysProvider } from "./keyboard/keys";
import { RouterProvider } from "./routing/router";
import { Shell } from "./shell";
import { ErrorBoundary } from "./ui/boundary";
import { PageNotFound } from "./ui/missing";
import { ToastProvider } from "./ui/toasts";

const JobsPage = lazy(() => import("./jobs/JobsPage"));
const JobPage = lazy(() => import("./job/JobPage"));
const ClusterPage = lazy(() => import("./cluster/ClusterPage"));
const SubmitPage = lazy(() => import("./submit/SubmitPage"));

export function App({ live }: { live: Live }) {
  return (
    <RouterProvider>
      <DataProvider live={live}>
        <KeysProvider>
          <ToastProvider>
            <Shell>
              <SignedIn>
                <View />
              </SignedIn>
            </Shell>
          </ToastProvider>
        </KeysProvider>
      </DataProvider>
    </RouterProvider>
  );
}

/** The views, or what to do for a browser that the server does not know. */
function SignedIn({ children }: { children: ReactNode }) {
  const why = useSyncExternalStore(onRefused, refused);
  if (why === null) return children;
  return (
    <div className="page">
      <div className="empty" role="alert">
        <h1>This browser is not signed in</h1>
        <p>
          On the server&rsquo;s machine, <code>holdfast dashboard</code> prints a link that signs it in. Open
          that link in this browser.
        </p>
        <p>{why}</p>
      </div>
    </div>
  );
}

function View() {
  const [path] = useLocation();
  return (
    <ErrorBoundary key={jobOf(path) ?? path}>
      <Suspense fallback={<div className="page" aria-busy="true" />}>
        <Switch>
          <Route path="/"><Redirect to="/jobs" replace /></Route>
          <Route path="/jobs" component={JobsPage} />
          <Route path="/jobs/:id/:tab?">{({ id, tab }) => <JobPage id={id} tab={tab} />}</Route>
          <Route path="/cluster" component={ClusterPage} />
          <Route path="/submit" component={SubmitPage} />
          <Route><PageNotFound /></Route>
        </Switch>
      </Suspense>
    </ErrorBoundary>
  );
}
