import { createRoot } from "react-dom/client";
import { App } from "./app";
import "./theme/tokens.css";
import "./theme/base.css";
import "./theme/components.css";
import "./theme/shell.css";

const root = document.getElementById("root");
if (root) createRoot(root).render(<App />);
