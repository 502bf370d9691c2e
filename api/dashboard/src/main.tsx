import { createRoot } from "react-dom/client";
import { App } from "./app";
import { jobOf } from "./data/context";
import { Live } from "./data/live";
import "./theme/tokens.css";
import "./theme/base.css";
import "./theme/components.css";
import "./theme/shell.css";

const live = new Live(jobOf(location.pathname));
live.start();
const root = document.getElementById("root");
if (root) createRoot(root).render(<App live={live} />);
