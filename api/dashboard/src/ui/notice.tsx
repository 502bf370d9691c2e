/** What is wrong with what should be seen here, and a way to try again. */

import { Unreachable } from "../api/client";
import { Icon } from "./icons";

export function Failure({ error, retry }: { error: Error; retry?: () => void }) {
  const away = error instanceof Unreachable;
  return (
    <div className={`notice ${away ? "warn" : "bad"}`} role="alert">
      <Icon name="warning" />
      <span className="grow">{away ? "The server does not answer. What is shown may be old; it is tried again by itself." : error.message}</span>
      {retry && (
        <button type="button" className="button tiny" onClick={retry}>
          Try again
        </button>
      )}
    </div>
  );
}
