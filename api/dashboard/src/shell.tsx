/** The frame around every view: navigation, the state of the live connection, the colour theme. */

import { useState, type ReactNode } from "react";
import { Link, useLocation } from "wouter";
import { useLiveStatus, useLiveStream, useNow } from "./data";
import { lasting } from "./format";
import { KeyboardHelp } from "./keyboard/help";
import { useShortcuts } from "./keyboard/keys";
import { useTheme } from "./theme/theme";
import { Icon, type IconName } from "./ui/icons";

const VIEWS: { to: string; name: string; icon: IconName }[] = [
  { to: "/jobs", name: "Jobs", icon: "jobs" },
  { to: "/cluster", name: "Cluster", icon: "cluster" },
  { to: "/submit", name: "Submit", icon: "submit" },
];

export function Shell({ children }: { children: ReactNode }) {
  const [path, go] = useLocation();
  const { dark, toggle } = useTheme();
  const [help, setHelp] = useState(false);
  useShortcuts("All pages", [
    { keys: "g j", label: "Jobs", run: () => go("/jobs") },
    { keys: "g c", label: "Cluster", run: () => go("/cluster") },
    { keys: "c", label: "Submit a job", run: () => go("/submit") },
    { keys: "t", label: "Dark or light", run: toggle },
    { keys: "?", label: "This help", run: () => setHelp(true) },
  ]);
  return (
    <div className="shell">
      <a className="skip" href="#main">
        Skip to content
      </a>
      <header className="rail">
        <Link to="/jobs" className="brand" aria-label="Holdfast: all jobs">
          <img src="/mark.svg" alt="" width="24" height="24" />
          <span>Holdfast</span>
        </Link>
        <nav aria-label="Views">
          {VIEWS.map(({ to, name, icon }) => (
            <Link key={to} to={to} aria-current={path.startsWith(to) ? "page" : undefined}>
              <Icon name={icon} />
              {name}
            </Link>
          ))}
        </nav>
        <div className="foot">
          <LiveIndicator />
          <div className="line">
            <button type="button" className="button quiet icon" onClick={toggle} aria-label={dark ? "Light colours" : "Dark colours"} title={dark ? "Light colours (t)" : "Dark colours (t)"}>
              <Icon name={dark ? "sun" : "moon"} />
            </button>
            <button type="button" className="button quiet icon only-wide" onClick={() => setHelp(true)} aria-label="Keyboard shortcuts" title="Keyboard shortcuts (?)">
              <Icon name="keyboard" />
            </button>
          </div>
        </div>
      </header>
      <main className="main" id="main" tabIndex={-1}>
        {children}
      </main>
      {help && <KeyboardHelp onClose={() => setHelp(false)} />}
    </div>
  );
}

/** Whether the shown data is live; otherwise for how long it has not been updated. */
function LiveIndicator() {
  const live = useLiveStream();
  const { state } = useLiveStatus();
  const { received_at } = live;
  const now = useNow();
  if (state === "live") {
    return (
      <div className="live is-running" role="status" data-live="live" title="Changes are shown as they happen">
        <i className="breathe" />
        <span className="second">Live</span>
      </div>
    );
  }
  const text = received_at === null ? "Connecting…" : `Not live for ${lasting(Math.max(1, now - received_at / 1000))}`;
  return (
    <button type="button" className="live is-recovering" data-live={state} onClick={live.retry} title="Reconnect now">
      <i />
      <span className="second">{text}</span>
    </button>
  );
}
