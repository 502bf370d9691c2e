// Runs before the program itself is loaded. Before the first paint it applies the colour theme chosen
// in this browser; without a choice the system's theme holds.
try {
  const chosen = localStorage.getItem("holdfast.theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is disabled: the system's theme holds.
}

// On the page of a job it opens the job's stream and, after the stream has begun, requests the data
// that the page shows first. src/api/early.ts serves these responses to the program.
const [, jobs, job, part] = location.pathname.split("/");
if (jobs === "jobs" && job && (part === undefined || part === "ranks") && !document.hidden && !location.hash.startsWith("#code=")) {
  const choices = new URLSearchParams(location.search);
  const heat = new URLSearchParams({ of: choices.get("of") ?? "compute_s", buckets: "120" });
  // As src/job/choices.ts reads them: a link may hold anything.
  const time = (name) => {
    const date = new Date(choices.get(name) ? Number(choices.get(name)) * 1000 : NaN);
    return Number.isNaN(date.getTime()) ? null : date.toISOString();
  };
  const [since, until] = [time("from"), time("to")];
  if (since && until) {
    heat.set("since", since);
    heat.set("until", until);
  }
  const live = `/api/v1/live?job=${job}`;
  const at = `/api/v1/jobs/${job}`;
  const abort = new AbortController();
  let key = null; // as src/api/session.ts stores it
  try {
    key = localStorage.getItem("holdfast.page-key");
  } catch {
    // Storage is disabled: the program asks again, with its key.
  }
  const withKey = (headers) => (key ? { ...headers, "Holdfast-Page-Key": key } : headers);
  const options = { headers: withKey({ Accept: "text/event-stream" }), signal: abort.signal, cache: "no-store" };
  const begins = fetch(live, options).then((response) => {
    if (!response.ok || !response.body) return { response, begun: null };
    const [ahead, all] = response.body.tee();
    const reader = ahead.getReader();
    return { response: new Response(all, response), begun: reader.read().then(() => void reader.cancel()) };
  });
  const begun = begins.then((stream) => stream.begun).catch(() => {});
  const glance = Promise.race([begun, new Promise((resolve) => setTimeout(resolve, 300))])
    .then(() => fetch(`${at}/glance?${heat}`, { headers: withKey({ Accept: "application/json" }) }))
    .then((response) => (response.ok ? response.json() : null));
  glance.catch(() => {});
  globalThis.holdfastEarly = {
    stream: { address: live, abort, response: begins.then((stream) => stream.response) },
    glance,
    parts: {
      [at]: "job",
      [`${at}/verdict`]: "verdict",
      [`${at}/timeline`]: "timeline",
      [`${at}/ranks/heat?${heat}`]: "heat",
    },
  };
}
