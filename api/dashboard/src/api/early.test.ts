import BOOT from "../../public/boot.js?raw";
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { get, url } from "./client";

const HELLO = "id: 1\nevent: hello\ndata: {}\n\n";
let asked: string[] = [];

/** The page at that path as it begins, with a server that answers all it is asked for. */
function begin(path: string, glance: unknown = { job: { id: "j" }, verdict: { doing: "trains" } }, status = 200): void {
  asked = [];
  vi.stubGlobal("document", { hidden: false, documentElement: { dataset: {} } });
  vi.stubGlobal("localStorage", { getItem: () => null });
  vi.stubGlobal("location", new URL(path, "http://127.0.0.1/"));
  vi.stubGlobal("fetch", (address: string) => {
    asked.push(address);
    if (address.startsWith("/api/v1/live")) return Promise.resolve(new Response(HELLO));
    if (address.includes("/glance")) return Promise.resolve(new Response(JSON.stringify(glance), { status }));
    return Promise.resolve(new Response(JSON.stringify({ anew: true })));
  });
  new Function(BOOT)();
}

beforeEach(() => vi.resetModules());
afterEach(() => {
  vi.unstubAllGlobals();
  globalThis.holdfastEarly = undefined;
});

test("what a page shows first is read before its program, after its stream has begun", async () => {
  begin("/jobs/a1?of=lag&from=10.50&to=20.00");
  await globalThis.holdfastEarly?.glance;
  expect(asked).toEqual([
    "/api/v1/live?job=a1",
    "/api/v1/jobs/a1/glance?of=lag&buckets=120&since=10.5&until=20",
  ]);
  const heat = url("/jobs/a1/ranks/heat", { of: "lag", buckets: 120, since: 10.5, until: 20 });
  expect(Object.keys(globalThis.holdfastEarly!.parts)).toContain(heat);
});

test("each part is given away once, then it is read anew", async () => {
  begin("/jobs/a2");
  expect(await get("/jobs/a2/verdict")).toEqual({ doing: "trains" });
  expect(await get("/jobs/a2/verdict")).toEqual({ anew: true });
  expect(await get("/jobs/other/verdict")).toEqual({ anew: true });
});

test("what was refused is asked for again, so that it is told why", async () => {
  begin("/jobs/a3", { code: "job_not_found" }, 404);
  expect(await get("/jobs/a3")).toEqual({ anew: true });
});

test("after an event, what was read before it is read anew", async () => {
  begin("/jobs/a5");
  const { get } = await import("./client");
  const { outdate } = await import("./early");
  expect(await get("/jobs/a5/verdict")).toEqual({ doing: "trains" });
  outdate();
  expect(await get("/jobs/a5")).toEqual({ anew: true });
});

test("other pages begin nothing", () => {
  for (const path of ["/jobs", "/jobs/", "/jobs/a4/checkpoints", "/cluster"]) {
    begin(path);
    expect(asked).toEqual([]);
  }
});
