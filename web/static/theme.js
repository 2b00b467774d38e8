// Before the first paint, so that nothing flashes: no module.
(() => {
  const root = document.documentElement;
  const stored = localStorage.getItem("stageline-theme");
  if (stored === "light" || stored === "dark") root.dataset.theme = stored;

  window.addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      const prefersDark = matchMedia("(prefers-color-scheme: dark)").matches;
      const present = root.dataset.theme ?? (prefersDark ? "dark" : "light");
      root.dataset.theme = present === "dark" ? "light" : "dark";
      localStorage.setItem("stageline-theme", root.dataset.theme);
      window.dispatchEvent(new Event("themechange"));
    });
  });
})();
