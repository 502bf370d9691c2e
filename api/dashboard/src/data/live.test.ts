import { afterEach, expect, test, vi } from "vitest";
import { Live } from "./live";

afterEach(() => {
  vi.unstubAllGlobals();
  vi.useRealTimers();
});

function openPage(hidden: boolean) {
  const page = Object.assign(new EventTarget(), { hidden });
  vi.stubGlobal("document", page);
  vi.stubGlobal("location", new URL("http://127.0.0.1/"));
  vi.stubGlobal("addEventListener", () => {});
  vi.stubGlobal("removeEventListener", () => {});
  return page;
}

test("data loaded after the stream has begun is not loaded again", async () => {
  openPage(false);
  let hello = () => {};
  const requests: string[] = [];
  vi.stubGlobal("fetch", (url: string) => {
    requests.push(url);
    const body = new ReadableStream({
      start: (stream) => {
        hello = () => stream.enqueue(new TextEncoder().encode('id: 1\nevent: hello\ndata: {"server_time":1}\n\n'));
      },
    });
    return Promise.resolve(new Response(body));
  });
  const live = new Live("job-1");
  const order: string[] = [];
  live.on("begun", () => order.push("begun"));
  live.start();
  live.watch("job-1");
  expect(requests).toEqual(["/api/v1/live?job=job-1"]);
  const reading = live.begun().then(() => order.push("read"));
  await Promise.resolve();
  expect(order).toEqual([]);
  hello();
  await reading;
  expect(order).toEqual(["begun", "read"]);
  live.stop();
});

test("a hidden tab has no stream; a visible tab resumes at the last message", async () => {
  const page = openPage(true);
  const requests: RequestInit[] = [];
  const answer = (_url: unknown, init: RequestInit) => {
    requests.push(init);
    const body = new ReadableStream({
      start: (stream) => stream.enqueue(new TextEncoder().encode('id: 7\nevent: hello\ndata: {"server_time":1}\n\n')),
    });
    return Promise.resolve(new Response(body, { headers: { "Content-Type": "text/event-stream" } }));
  };
  vi.stubGlobal("fetch", answer);
  const setHidden = (hidden: boolean) => {
    page.hidden = hidden;
    page.dispatchEvent(new Event("visibilitychange"));
  };

  const live = new Live();
  live.start();
  live.retry();
  live.watch("job");
  expect(requests.length).toBe(0);
  setHidden(false);
  await vi.waitFor(() => expect(live.status().state).toBe("live"));
  await vi.waitFor(() => expect(live.status().ahead_s).not.toBe(0));
  setHidden(true);
  expect(requests[0]?.signal?.aborted).toBe(true);
  live.retry();
  expect(requests.length).toBe(1);
  setHidden(false);
  await vi.waitFor(() => expect(requests.length).toBe(2));
  expect(new Headers(requests[1]?.headers).get("Last-Event-ID")).toBe("7");
  live.stop();
  setHidden(false);
  expect(requests.length).toBe(2);
});

test("a connection that never answers is given up", () => {
  vi.useFakeTimers();
  openPage(false);
  const signals: (AbortSignal | null | undefined)[] = [];
  vi.stubGlobal("fetch", (_url: unknown, init: RequestInit) => {
    signals.push(init.signal);
    return new Promise<Response>(() => {});
  });
  const live = new Live();
  live.start();
  vi.advanceTimersByTime(60_000);
  expect(signals.map((signal) => signal?.aborted)).toEqual([true, false]);
  live.stop();
  vi.advanceTimersByTime(60_000);
  expect(signals.map((signal) => signal?.aborted)).toEqual([true, true]);
});

test("a proxy's 404 does not end the watch of a job", async () => {
  vi.useFakeTimers();
  openPage(false);
  const requests: string[] = [];
  vi.stubGlobal("fetch", (url: string) => {
    requests.push(url);
    return Promise.resolve(requests.length === 1 ? new Response("<html>", { status: 404 }) : new Response(new ReadableStream()));
  });
  const live = new Live("job-1");
  live.start();
  await vi.advanceTimersByTimeAsync(3000);
  expect(requests).toEqual(["/api/v1/live?job=job-1", "/api/v1/live?job=job-1"]);
  live.stop();
});

test("a link to a job that the server does not know ends in a stream without a job", async () => {
  vi.useFakeTimers();
  openPage(false);
  const requests: string[] = [];
  vi.stubGlobal("fetch", (url: string) => {
    requests.push(url);
    const unknown = { type: "about:blank", title: "Not Found", status: 404, code: "job_not_found" };
    return Promise.resolve(
      url.includes("job=") ? new Response(JSON.stringify(unknown), { status: 404 }) : new Response(new ReadableStream()),
    );
  });
  const live = new Live("unknown");
  live.start();
  await vi.advanceTimersByTimeAsync(3000);
  expect(requests).toEqual(["/api/v1/live?job=unknown", "/api/v1/live"]);
  expect(live.status().state).toBe("live");
  live.stop();
});
