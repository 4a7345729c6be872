"""A thousand steps: what the process holds does not grow. Live, cached and on-policy runs share them."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

from campaign import Campaign, Forge
from tiny_runs import TinyRuns

MOST_MB = 6.0  # by which the memory of a run may be larger in its last quarter than in its second
WRITES = {"on_policy_fraction": 0.7, "prompt_tokens": 6, "sampling": {"max_new_tokens": 8}}


def test_soak(runs: TinyRuns, forge: Forge) -> None:
    campaign = Campaign("soak", 240)
    cache = runs.folder / "cache"
    assert forge.command("cache", "build", runs.teacher, "--data", runs.text, "--out", cache, "--k", 8).code == 0
    # Often, so that what the first of them leaves behind is there when the watching begins
    every = {"every": 5, "keep": 2}
    kinds: dict[str, tuple[int, dict[str, Any]]] = {
        "live": (400, {"eval": runs.evaluation(every=5)}),
        "cached": (300, {"teachers": [{"cache": str(cache)}]}),
        "on-policy": (300, {"rollouts": WRITES}),
    }
    for kind, (whole, sections) in kinds.items():
        steps = max(60, campaign.scaled(whole) // 10 * 10)
        recipe = runs.file(kind, f"train.steps={steps}", checkpoint=every, **sections)
        out = runs.folder / f"{kind}.json"
        ended = forge.do("soak", recipe, out, seconds=1800)
        assert ended.code == 0, ended.err
        seen = json.loads(out.read_text())
        campaign.wanted += steps
        campaign.count += seen[-1]["step"]
        quarter = len(seen) // 4
        for what in ("rss", "files", "threads"):
            before = median(one[what] for one in seen[quarter : 2 * quarter])
            after = median(one[what] for one in seen[-quarter:])
            grown = (after - before) / 2**20 if what == "rss" else after - before
            campaign.facts[f"{kind}, {what} grown"] = round(grown, 2)
            if grown > (MOST_MB if what == "rss" else 0):
                campaign.found(kind, f"{what} grew from {before} to {after}")
    campaign.end()
