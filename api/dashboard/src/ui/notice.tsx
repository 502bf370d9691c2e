/** An error in place of the content, with a button to retry. */

import { Unreachable } from "../api/client";
import { Icon } from "./icons";

export function Failure({ error, retry }: { error: Error; retry?: () => void }) {
  const unreachable = error instanceof Unreachable;
  return (
    <div className={`notice ${unreachable ? "warn" : "bad"}`} role="alert">
      <Icon name="warning" />
      <span className="grow">{unreachable ? "The server does not answer. The shown data may be stale; the page retries by itself." : error.message}</span>
      {retry && (
        <button type="button" className="button tiny" onClick={retry}>
          Try again
        </button>
      )}
    </div>
  );
}
