/** Parses server-sent events by the standard, but from a fetch: unlike EventSource this resumes after
 * an error response, too, and sees the comments that a server sends as keep-alives. */

export interface Message {
  id: string | null;
  event: string;
  data: string;
}

/** Accepts text in pieces of any size; returns each message when it is complete. */
export class Parser {
  private rest = "";
  private id: string | null = null;
  private event = "";
  private data: string[] = [];

  push(text: string): Message[] {
    const found: Message[] = [];
    const lines = (this.rest + text).split(/\r\n|\n|\r(?!$)/);
    this.rest = lines.pop() ?? "";
    for (const line of lines) {
      const message = this.line(line);
      if (message) found.push(message);
    }
    return found;
  }

  private line(line: string): Message | null {
    if (line === "") return this.finish();
    if (line.startsWith(":")) return null;
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "id") this.id = value;
    else if (field === "event") this.event = value;
    else if (field === "data") this.data.push(value);
    return null;
  }

  private finish(): Message | null {
    const { id, event, data } = this;
    this.event = "";
    this.data = [];
    return data.length ? { id, event: event || "message", data: data.join("\n") } : null;
  }
}
