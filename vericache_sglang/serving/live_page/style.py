"""The page's style sheet: light and dark, from 320 px on."""

from __future__ import annotations

STYLE = """
:root {
  --paper: #f6f7f9; --card: #fff; --ink: #1b2430; --soft: #5b6675; --line: #dfe3e9;
  --rail: #e8ebf0; --draft: #2f6fd6; --verify: #0e8a63; --wait: #b4720a;
  --plain: #6b7686; --parked: #8a4fc4; --alarm: #c62f35;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #12161c; --card: #1a2028; --ink: #e7ebf0; --soft: #98a4b3;
    --line: #2b333e; --rail: #29313b; --draft: #6ea3ff; --verify: #3ecf9b;
    --wait: #f0b04a; --plain: #97a3b2; --parked: #c195f2; --alarm: #ff7a7f;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.25rem 1rem 3rem; max-width: 68rem;
  background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
h1 { display: inline; margin: 0; font-size: 1.35rem; letter-spacing: -.01em; }
h2 { margin: 2rem 0 .5rem; font-size: 1.1rem; }
h3 {
  margin: 1.75rem 0 .6rem; font-size: .8rem; color: var(--soft);
  text-transform: uppercase; letter-spacing: .06em;
}
ul, ol, dl, dd, figure { margin: 0; padding: 0; list-style: none; }
svg { display: block; width: 100%; }
.rail { fill: var(--rail); }
.fill { fill: var(--tone, var(--draft)); }
.note { color: var(--soft); font-size: .8rem; }
.words { font-variant-numeric: tabular-nums; }
.head { margin: .15rem 0 0; font-variant-numeric: tabular-nums; }
.head span { margin-right: .5rem; overflow-wrap: anywhere; }
.state { margin: .75rem 0; }
.failure {
  padding: .6rem .8rem; border: 1px solid var(--alarm); border-radius: 8px;
  color: var(--alarm);
}
.old { opacity: .5; }
.draft { --tone: var(--draft); }
.verify { --tone: var(--verify); }
.wait { --tone: var(--wait); }
.plain { --tone: var(--plain); }
.parked { --tone: var(--parked); }

.tiles {
  display: grid; gap: .6rem;
  grid-template-columns: repeat(auto-fit, minmax(8.2rem, 1fr));
}
.tile, .lanes, .ring, .memory {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px;
}
.tile { padding: .6rem .75rem; }
.tile dt { color: var(--soft); font-size: .8rem; line-height: 1.25; }
.tile dd { font-size: 1.5rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile dd.note { font-size: .75rem; font-weight: 400; }
.alarm { border-color: var(--alarm); }
.alarm dd { color: var(--alarm); }

.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin-bottom: .5rem; }
.legend li { font-size: .85rem; color: var(--soft); }
.legend b { color: var(--ink); font-variant-numeric: tabular-nums; }
.legend i {
  display: inline-block; width: .7rem; height: .7rem; margin-right: .35rem;
  border-radius: 3px; background: var(--tone);
}
.lanes { overflow: hidden; }
.lane {
  display: grid; align-items: center; gap: .1rem .9rem; padding: .5rem .75rem;
  grid-template-columns: minmax(6rem, 13rem) 5.5rem 1fr;
  border-left: 4px solid var(--tone);
}
.lane + .lane { border-top: 1px solid var(--line); }
.rid {
  overflow: hidden; text-overflow: ellipsis; white-space: nowrap;
  font: .85rem ui-monospace, "DejaVu Sans Mono", monospace;
}
.phase { color: var(--tone); font-weight: 600; font-size: .9rem; }
.progress { display: grid; grid-template-columns: 1fr 9.5rem; gap: .75rem; }
.progress .words { font-size: .85rem; }
.bar { height: .6rem; border-radius: 4px; align-self: center; }
.facts {
  grid-column: 1 / -1; display: flex; flex-wrap: wrap; gap: 0 1.1rem;
  color: var(--soft); font-size: .8rem; font-variant-numeric: tabular-nums;
}

.rings { display: grid; gap: .6rem; grid-template-columns: repeat(3, 1fr); }
.ring { padding: .6rem .75rem; --tone: var(--verify); }
.ring figcaption { font-size: .85rem; margin-bottom: .4rem; }
.ring figcaption b, .ring figcaption .note { display: block; }
.area { height: 4rem; border-radius: 4px; }
.axis {
  display: flex; justify-content: space-between; margin: .2rem 0 0;
  color: var(--soft); font-size: .75rem;
}
.memory li {
  display: grid; grid-template-columns: 13rem 1fr 11rem; gap: .9rem;
  align-items: center; padding: .4rem .75rem; font-size: .9rem;
}
.memory li + li { border-top: 1px solid var(--line); }
.memory { --tone: var(--plain); }

@media (max-width: 40rem) {
  .tiles { grid-template-columns: repeat(2, 1fr); }
  .lane { grid-template-columns: 1fr auto; }
  .progress { grid-column: 1 / -1; grid-template-columns: 1fr 9rem; }
  .rings { grid-template-columns: 1fr; }
  .memory li { grid-template-columns: 1fr auto; gap: .2rem .9rem; }
  .memory .bar { grid-column: 1 / -1; grid-row: 2; }
}
"""
