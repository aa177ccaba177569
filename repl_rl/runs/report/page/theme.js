/* Light or dark: as the system has it, until the button says otherwise. */

function themeButton() {
  return el("button", { class: "theme", title: "light or dark", "aria-label": "light or dark", onclick: toggleTheme }, "◐");
}

function toggleTheme() {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark" ||
    (document.documentElement.dataset.theme === undefined && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
}
