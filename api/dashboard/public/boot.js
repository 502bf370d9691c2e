// What cannot wait for the program itself. Before the first paint: the colours that were chosen here,
// if any; otherwise the system's.
try {
  const chosen = localStorage.getItem("holdfast.theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is switched off: the system's colours it is.
}

// On the page of a job: its stream, and once that has begun, what the page shows first.
// src/api/early.ts hands it to those who would have asked for it.
const [, jobs, job, part] = location.pathname.split("/");
if (jobs === "jobs" && job && part === undefined && !document.hidden) {
  const choices = new URLSearchParams(location.search);
  const heat = new URLSearchParams({ of: choices.get("of") ?? "compute_s", buckets: "120" });
  if (choices.has("from") && choices.has("to")) {
    heat.set("since", String(Number(choices.get("from"))));
    heat.set("until", String(Number(choices.get("to"))));
  }
  const live = `/api/v1/live?job=${job}`;
  const at = `/api/v1/jobs/${job}`;
  const stopping = new AbortController();
  const asked = { headers: { Accept: "text/event-stream" }, signal: stopping.signal, cache: "no-store" };
  const begins = fetch(live, asked).then((response) => {
    if (!response.ok || !response.body) return { response, begun: null };
    const [ahead, all] = response.body.tee();
    const reader = ahead.getReader();
    return { response: new Response(all, response), begun: reader.read().then(() => void reader.cancel()) };
  });
  const begun = begins.then((one) => one.begun).catch(() => {});
  const glance = Promise.race([begun, new Promise((over) => setTimeout(over, 300))])
    .then(() => fetch(`${at}/glance?${heat}`, { headers: { Accept: "application/json" } }))
    .then((response) => (response.ok ? response.json() : null));
  glance.catch(() => {});
  globalThis.holdfastEarly = {
    stream: { address: live, stopping, response: begins.then((one) => one.response) },
    glance,
    parts: {
      [at]: "job",
      [`${at}/verdict`]: "verdict",
      [`${at}/timeline`]: "timeline",
      [`${at}/ranks/heat?${heat}`]: "heat",
    },
  };
}
