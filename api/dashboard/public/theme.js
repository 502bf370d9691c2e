// Before the first paint: the colours that were chosen here, if any; otherwise the system's.
try {
  const chosen = localStorage.getItem("holdfast.theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is switched off: the system's colours it is.
}
