import { Dialog } from "../ui/dialog";
import { useShortcutGroups } from "./keys";

export function KeyboardHelp({ onClose }: { onClose: () => void }) {
  const groups = useShortcutGroups();
  return (
    <Dialog title="Keyboard shortcuts" onClose={onClose}>
      <div className="inside">
        <h2>Keyboard shortcuts</h2>
        {groups.map((group) => (
          <section key={group.title} className="stack">
            <h3 className="dim">{group.title}</h3>
            <dl>
              {group.shortcuts.map((shortcut) => (
                <div key={shortcut.keys} style={{ display: "contents" }}>
                  <dt>
                    {shortcut.keys.split(" ").map((key) => (
                      <span key={key}>
                        <kbd>{key === "Enter" ? "↵" : key}</kbd>{" "}
                      </span>
                    ))}
                  </dt>
                  <dd>{shortcut.label}</dd>
                </div>
              ))}
            </dl>
          </section>
        ))}
        <footer>
          <button type="button" className="button" onClick={onClose}>
            Close
          </button>
        </footer>
      </div>
    </Dialog>
  );
}
