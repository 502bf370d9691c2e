/** The colour theme: the choice of the user, else the setting of the system. */

import { useCallback, useSyncExternalStore } from "react";

export type Choice = "system" | "light" | "dark";

const KEY = "holdfast.theme";
const CHANGED = "holdfast:theme";

function chosen(): Choice {
  const value = document.documentElement.dataset["theme"];
  return value === "dark" || value === "light" ? value : "system";
}

function choose(choice: Choice): void {
  const root = document.documentElement;
  if (choice === "system") delete root.dataset["theme"];
  else root.dataset["theme"] = choice;
  try {
    if (choice === "system") localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, choice);
  } catch {
    // Storage is disabled: the choice holds for this page only.
  }
  dispatchEvent(new Event(CHANGED));
}

const system = () => matchMedia("(prefers-color-scheme: dark)");

function subscribe(watcher: () => void): () => void {
  const query = system();
  query.addEventListener("change", watcher);
  addEventListener(CHANGED, watcher);
  return () => {
    query.removeEventListener("change", watcher);
    removeEventListener(CHANGED, watcher);
  };
}

/** `dark`: the effective theme; a canvas is drawn again when it changes. */
export function useTheme(): { choice: Choice; dark: boolean; choose: (choice: Choice) => void; toggle: () => void } {
  const choice = useSyncExternalStore(subscribe, chosen);
  const systemDark = useSyncExternalStore(subscribe, () => system().matches);
  const dark = choice === "system" ? systemDark : choice === "dark";
  const toggle = useCallback(() => choose(dark ? "light" : "dark"), [dark]);
  return { choice, dark, choose, toggle };
}

/** The present value of a colour variable (`--running`) as `rgb(...)`: for canvases. */
export function colorOf(variable: string): string {
  const probe = document.createElement("span");
  probe.style.color = `var(${variable})`;
  document.body.append(probe);
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
}
