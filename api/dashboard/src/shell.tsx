/** The frame around every view: where one can go, whether the picture is live, and the colours. */

import { useState, type ReactNode } from "react";
import { useLiveStatus, useNow } from "./data";
import { useShared } from "./data/context";
import { roughly } from "./format";
import { KeyboardHelp } from "./keyboard/help";
import { useShortcuts } from "./keyboard/keys";
import { Link, useRouter } from "./routing/router";
import { useTheme } from "./theme/theme";
import { Icon, type IconName } from "./ui/icons";

const VIEWS: { to: string; name: string; icon: IconName }[] = [
  { to: "/jobs", name: "Jobs", icon: "jobs" },
  { to: "/cluster", name: "Cluster", icon: "cluster" },
  { to: "/submit", name: "Submit", icon: "submit" },
];

export function Shell({ children }: { children: ReactNode }) {
  const { path, go } = useRouter();
  const { dark, toggle } = useTheme();
  const [help, setHelp] = useState(false);
  useShortcuts("Everywhere", [
    { keys: "g j", what: "Jobs", run: () => go("/jobs") },
    { keys: "g c", what: "Cluster", run: () => go("/cluster") },
    { keys: "c", what: "Submit a job", run: () => go("/submit") },
    { keys: "t", what: "Dark or light", run: toggle },
    { keys: "?", what: "This help", run: () => setHelp(true) },
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
          <Freshness />
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

/** Whether what is shown is of now; while it is not, for how long it has not been. */
function Freshness() {
  const { live } = useShared();
  const { state } = useLiveStatus();
  const { heard_at } = live;
  const now = useNow();
  if (state === "live") {
    return (
      <div className="live is-running" role="status" data-live="live" title="Changes are shown as they happen">
        <i className="breathe" />
        <span className="second">Live</span>
      </div>
    );
  }
  const old = heard_at === null ? null : roughly(now - heard_at / 1000);
  const words = old === null ? "Connecting…" : `Not live for ${old === "now" ? "1s" : old}`;
  return (
    <button type="button" className="live is-recovering" data-live={state} onClick={live.retry} title="Connect again now">
      <i />
      <span className="second">{words}</span>
    </button>
  );
}
