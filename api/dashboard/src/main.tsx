import { createRoot } from "react-dom/client";
import { send } from "./api/client";
import { hasCode, openSession } from "./api/session";
import { App } from "./app";
import { jobOf } from "./data/context";
import { Live } from "./data/live";
import "./theme/tokens.css";
import "./theme/base.css";
import "./theme/components.css";
import "./theme/shell.css";

const begin = (): void => {
  const live = new Live(jobOf(location.pathname));
  live.start();
  const root = document.getElementById("root");
  if (root) createRoot(root).render(<App live={live} />);
};
const EXCHANGE_MS = 10_000;
void openSession((code) => send("POST", "/session", { code, signal: AbortSignal.timeout(EXCHANGE_MS) })).then(begin, begin);
addEventListener("hashchange", () => {
  if (hasCode()) location.reload(); // a link that was opened in this very tab
});
