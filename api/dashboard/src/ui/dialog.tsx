/** A native dialog: it keeps the focus inside, Escape closes it, and the focus then returns to the
 * element that had it before. */

import { useLayoutEffect, useRef, type ReactNode } from "react";

interface DialogProps {
  title: string;
  onClose: () => void;
  children: ReactNode;
  wide?: boolean;
}

export function Dialog({ title, onClose, children, wide = false }: DialogProps) {
  const element = useRef<HTMLDialogElement>(null);
  // Also closed before it is unmounted: closing returns the focus.
  useLayoutEffect(() => {
    const dialog = element.current;
    dialog?.showModal();
    return () => dialog?.close();
  }, []);
  return (
    <dialog
      ref={element}
      className={`dialog${wide ? " wide" : ""}`}
      aria-label={title}
      onClose={onClose}
      onClick={(event) => {
        if (event.target === element.current) element.current?.close();
      }}
    >
      {children}
    </dialog>
  );
}

interface ConfirmProps {
  title: string;
  action: string;
  danger?: boolean;
  busy?: boolean;
  disabled?: boolean;
  onConfirm: () => void;
  onClose: () => void;
  children: ReactNode;
}

/** Explains an action and asks for confirmation. */
export function Confirm({ title, action, danger = false, busy = false, disabled = false, onConfirm, onClose, children }: ConfirmProps) {
  return (
    <Dialog title={title} onClose={onClose}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          onConfirm();
        }}
      >
        <h2>{title}</h2>
        {children}
        <footer>
          <button type="button" className="button" onClick={onClose}>
            Back
          </button>
          <button type="submit" className={`button primary${danger ? " danger" : ""}`} disabled={busy || disabled}>
            {busy ? "Working…" : action}
          </button>
        </footer>
      </form>
    </Dialog>
  );
}
