// Looks again by itself, and says a change to those who do not see it. Without it the page is complete.
"use strict";
(() => {
  const main = document.querySelector("main[data-refresh]");
  const said = document.getElementById("said");
  const asof = document.getElementById("asof");
  if (!main || !said || !asof) return;
  let timer, failed = false;
  const wait = () => {
    clearTimeout(timer);
    timer = setTimeout(look, 1000 * (failed ? 5 : Number(main.dataset.refresh)));
  };
  const reading = () => {
    const s = getSelection();
    return s && !s.isCollapsed && main.contains(s.anchorNode); // who marks a text wants to keep it
  };
  async function look() {
    if (document.hidden || reading()) return wait();
    try {
      const answer = await fetch(location.origin + location.pathname, { cache: "no-store", signal: AbortSignal.timeout(10000) });
      if (!answer.ok) throw new Error(answer.status);
      show(new DOMParser().parseFromString(await answer.text(), "text/html"));
    } catch {
      if (!failed) {
        failed = true;
        asof.classList.add("away");
        asof.querySelector("span").append(", and no answer since");
        said.textContent = "Toad does not answer. The page shows what was last known.";
      }
    }
    wait();
  }
  function show(page) {
    const next = page.querySelector("main[data-refresh]");
    const focus = main.contains(document.activeElement) ? document.activeElement.id : "";
    for (const d of main.querySelectorAll("details[id]")) {
      const same = page.getElementById(d.id);
      if (same) same.open = d.open;
    }
    const news = next.dataset.say !== main.dataset.say || failed;
    failed = false;
    asof.classList.remove("away");
    asof.querySelector("span").replaceWith(page.querySelector("#asof span"));
    document.title = page.title;
    main.dataset.refresh = next.dataset.refresh;
    main.dataset.say = next.dataset.say;
    main.replaceChildren(...next.childNodes);
    if (focus) document.getElementById(focus)?.focus({ preventScroll: true });
    if (news) said.textContent = main.dataset.say;
  }
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
  wait();
})();
