/** Keyboard shortcuts: a single listener; views register theirs while mounted. Shortcuts are inactive
 * while the user types or a dialog is open. */

import { createContext, useContext, useEffect, useMemo, useRef, type ReactNode } from "react";

export interface Shortcut {
  /** `j`, `?`, `Enter`, or two in a row: `g j`. */
  keys: string;
  label: string;
  run: (event: KeyboardEvent) => void;
}

interface Group {
  title: string;
  shortcuts: readonly Shortcut[];
}

class Keys {
  readonly groups = new Set<{ current: Group }>();
  private before: string | null = null;
  private forget: ReturnType<typeof setTimeout> | undefined;

  readonly onKey = (event: KeyboardEvent): void => {
    if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target)) return;
    if (document.querySelector("dialog[open]")) return;
    const both = this.before === null ? null : `${this.before} ${event.key}`;
    const all = [...this.groups].reverse().flatMap((group) => group.current.shortcuts);
    const found = all.find(({ keys }) => keys === both) ?? all.find(({ keys }) => keys === event.key);
    clearTimeout(this.forget);
    this.before = !found && event.key.length === 1 ? event.key : null;
    this.forget = setTimeout(() => (this.before = null), 900);
    if (!found) return;
    event.preventDefault();
    found.run(event);
  };
}

function typing(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName));
}

const KeysContext = createContext<Keys | null>(null);

export function KeysProvider({ children }: { children: ReactNode }) {
  const keys = useMemo(() => new Keys(), []);
  useEffect(() => {
    addEventListener("keydown", keys.onKey);
    return () => removeEventListener("keydown", keys.onKey);
  }, [keys]);
  return <KeysContext.Provider value={keys}>{children}</KeysContext.Provider>;
}

function useKeys(): Keys {
  const keys = useContext(KeysContext);
  if (!keys) throw new Error("outside of KeysProvider");
  return keys;
}

/** Registers shortcuts while mounted; `title` is their heading in the help. */
export function useShortcuts(title: string, shortcuts: readonly Shortcut[]): void {
  const keys = useKeys();
  const group = useRef<Group>({ title, shortcuts });
  useEffect(() => {
    group.current = { title, shortcuts };
  });
  useEffect(() => {
    keys.groups.add(group);
    return () => {
      keys.groups.delete(group);
    };
  }, [keys]);
}

/** The shortcuts that are active at present. */
export function useShortcutGroups(): readonly Group[] {
  return [...useKeys().groups].map((group) => group.current);
}
