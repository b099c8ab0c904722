"""The page's JavaScript: new content every second, the old one where that fails."""

from __future__ import annotations

SCRIPT = """
"use strict";
const live = document.getElementById("live");
const stale = document.getElementById("stale");
let updates = 0;

async function update() {
  if (!document.hidden) {
    try {
      const reply = await fetch(location.pathname + "?fragment=1", {
        cache: "no-store",
        signal: AbortSignal.timeout(10000),
      });
      const text = await reply.text();
      if (!reply.ok) throw new Error("HTTP " + reply.status);
      live.innerHTML = text;
      live.classList.remove("old");
      stale.hidden = true;
      updates += 1;
      document.body.dataset.updates = updates;
    } catch (error) {
      live.classList.add("old");
      stale.textContent = "No answer (" + error.message + "); what follows is older.";
      stale.hidden = false;
    }
  }
  setTimeout(update, 1000);
}

setTimeout(update, 1000);
"""
