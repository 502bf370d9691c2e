/** Short messages about the result of an action; errors stay until they are closed. */

import { createContext, useCallback, useContext, useMemo, useState, type ReactNode } from "react";
import { Icon } from "./icons";

interface Toast {
  number: number;
  text: string;
  bad: boolean;
}

interface Toasts {
  notify: (text: string) => void;
  fail: (error: unknown) => void;
}

const ToastContext = createContext<Toasts | null>(null);
const SHOWN_MS = 5000;

export function ToastProvider({ children }: { children: ReactNode }) {
  const [toasts, setToasts] = useState<Toast[]>([]);
  const close = useCallback((number: number) => setToasts((all) => all.filter((toast) => toast.number !== number)), []);
  const add = useCallback((text: string, bad: boolean) => {
    const number = performance.now();
    setToasts((all) => [...all.slice(-3), { number, text, bad }]);
    if (!bad) setTimeout(() => close(number), SHOWN_MS);
  }, [close]);
  const value = useMemo<Toasts>(() => ({
    notify: (text) => add(text, false),
    fail: (error) => add(error instanceof Error ? error.message : String(error), true),
  }), [add]);
  return (
    <ToastContext.Provider value={value}>
      {children}
      <div className="toasts" role="status" aria-live="polite">
        {toasts.map((toast) => (
          <div key={toast.number} className={`toast ${toast.bad ? "is-failed" : "is-succeeded"}`}>
            <span className="grow" style={{ color: "var(--text)" }}>{toast.text}</span>
            <button type="button" className="button quiet icon tiny" aria-label="Close message" onClick={() => close(toast.number)}>
              <Icon name="close" size={14} />
            </button>
          </div>
        ))}
      </div>
    </ToastContext.Provider>
  );
}

export function useToasts(): Toasts {
  const toasts = useContext(ToastContext);
  if (!toasts) throw new Error("outside of ToastProvider");
  return toasts;
}

/** Runs an action and shows a message about its result. */
export function useAction(): { busy: boolean; run: (work: () => Promise<unknown>, done?: string) => Promise<boolean> } {
  const { notify, fail } = useToasts();
  const [busy, setBusy] = useState(false);
  const run = useCallback(async (work: () => Promise<unknown>, done?: string) => {
    setBusy(true);
    try {
      await work();
      if (done) notify(done);
      return true;
    } catch (error) {
      fail(error);
      return false;
    } finally {
      setBusy(false);
    }
  }, [notify, fail]);
  return { busy, run };
}
