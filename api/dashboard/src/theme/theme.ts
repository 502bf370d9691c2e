/** Dark or light: as the system says, unless chosen here. */

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
    // Storage is switched off: it holds for this page only.
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

/** `dark` is what is shown; a canvas is drawn anew when it changes. */
export function useTheme(): { choice: Choice; dark: boolean; choose: (choice: Choice) => void; toggle: () => void } {
  const choice = useSyncExternalStore(subscribe, chosen);
  const systemDark = useSyncExternalStore(subscribe, () => system().matches);
  const dark = choice === "system" ? systemDark : choice === "dark";
  const toggle = useCallback(() => choose(dark ? "light" : "dark"), [dark]);
  return { choice, dark, choose, toggle };
}

/** The colour that a variable (`--running`) has now, as `rgb(...)`: for canvases. */
export function colorOf(variable: string): string {
  const probe = document.createElement("span");
  probe.style.color = `var(${variable})`;
  document.body.append(probe);
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
}
