import BOOT from "../../public/boot.js?raw";
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { get, url } from "./client";

const HELLO = "id: 1\nevent: hello\ndata: {}\n\n";
let requested: string[] = [];

/** Loads the page at that path, with a server that answers every request. */
function loadPage(path: string, glance: unknown = { job: { id: "j" }, verdict: { doing: "trains" } }, status = 200): void {
  requested = [];
  vi.stubGlobal("document", { hidden: false, documentElement: { dataset: {} } });
  vi.stubGlobal("localStorage", { getItem: () => null });
  vi.stubGlobal("location", new URL(path, "http://127.0.0.1/"));
  vi.stubGlobal("fetch", (address: string) => {
    requested.push(address);
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

test("the first data of a page is requested before its program is loaded, after its stream has begun", async () => {
  loadPage("/jobs/a1?of=lag&from=10.50&to=20.00");
  await globalThis.holdfastEarly?.glance;
  expect(requested).toEqual([
    "/api/v1/live?job=a1",
    "/api/v1/jobs/a1/glance?of=lag&buckets=120&since=1970-01-01T00%3A00%3A10.500Z&until=1970-01-01T00%3A00%3A20.000Z",
  ]);
  const heat = url("/jobs/a1/ranks/heat", { of: "lag", buckets: 120, since: 10.5, until: 20 });
  expect(Object.keys(globalThis.holdfastEarly!.parts)).toContain(heat);
});

test("each part is served once, then it is requested again", async () => {
  loadPage("/jobs/a2");
  expect(await get("/jobs/a2/verdict")).toEqual({ doing: "trains" });
  expect(await get("/jobs/a2/verdict")).toEqual({ anew: true });
  expect(await get("/jobs/other/verdict")).toEqual({ anew: true });
});

test("a refused early request is repeated, so that the page can report the reason", async () => {
  loadPage("/jobs/a3", { code: "job_not_found" }, 404);
  expect(await get("/jobs/a3")).toEqual({ anew: true });
});

test("after an event, parts requested before it are requested again", async () => {
  loadPage("/jobs/a5");
  const { get } = await import("./client");
  const { outdate } = await import("./early");
  expect(await get("/jobs/a5/verdict")).toEqual({ doing: "trains" });
  outdate();
  expect(await get("/jobs/a5")).toEqual({ anew: true });
});

test("other pages request nothing early", () => {
  for (const path of ["/jobs", "/jobs/", "/jobs/a4/checkpoints", "/cluster"]) {
    loadPage(path);
    expect(requested).toEqual([]);
  }
});
