"""What `preview` found, for a terminal, as a page, or as JSON. Supervised tokens stand between ⟦ and ⟧, and are in colour
where there is colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from itertools import groupby

from rich.console import Console
from rich.text import Text

from potstill.preview.readings import Reading, Shown, Token

Part = tuple[bool, str]  # whether it is supervised, and the text


def as_json(shown: Sequence[Shown]) -> list[dict[str, object]]:
    return [asdict(one) for one in shown]


def print_shown(shown: Sequence[Shown], console: Console, most: int) -> None:
    """`most`: tokens of a reading, and characters of a text, that are shown."""
    for number, one in enumerate(shown):
        console.print(Text(f"{_rule(number)}{one.where}", style="bold"))
        console.print(Text(f"supervised text: the {one.writer}'s", style="dim"))
        console.print(_line(text_parts(one, most * 4)))
        for reading in one.readings:
            console.print(Text(_about(reading), style="dim"))
            if reading.tokens:
                console.print(_line(token_parts(reading.tokens[:most])))
            if len(reading.tokens) > most:
                console.print(Text(f"… and {len(reading.tokens) - most} more tokens (--tokens)", style="dim"))


def _rule(number: int) -> str:
    return "\n" if number else ""


def _about(reading: Reading) -> str:
    count = f"{len(reading.tokens)} tokens, {reading.supervised} supervised" if reading.tokens else ""
    return f"{reading.reader}: {'; '.join(filter(None, [count, reading.note]))}"


def text_parts(one: Shown, most: int) -> Iterator[Part]:
    """The text, cut where what is supervised begins and ends."""
    at, text = 0, one.text[:most] + ("…" if len(one.text) > most else "")
    for begin, end in one.spans:
        yield False, text[at:begin]
        yield True, text[begin:end]
        at = end
    yield False, text[at:]


def token_parts(tokens: Sequence[Token]) -> Iterator[Part]:
    for supervised, group in groupby(tokens, key=lambda token: token.supervised):
        yield supervised, "│".join(token.text for token in group)


def _line(parts: Iterator[Part]) -> Text:
    line = Text()
    for supervised, text in parts:
        if text:
            # What a terminal would obey is shown, not sent.
            safe = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
            line.append(f"⟦{safe}⟧" if supervised else safe, style="bold green" if supervised else "dim")
    return line


STYLE = """
:root { color-scheme: light dark; --ground: #fbfaf8; --ink: #1d1b19; --quiet: #68625b; --rule: #cfc8be; --learnt: #cfeadb; }
@media (prefers-color-scheme: dark) { :root { --ground: #15161a; --ink: #e9e6e1; --quiet: #a29c94; --rule: #44474f;
  --learnt: #1d4a37; } }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
section { border-top: 1px solid var(--rule); padding: .5rem 0 1rem; } h2 { font-size: 1rem; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.6 ui-monospace, monospace; margin: .2rem 0 .8rem; }
p { color: var(--quiet); margin: 0; } mark { background: var(--learnt); color: inherit; }
.tokens span { border: 1px solid var(--rule); border-radius: 3px; padding: 0 2px; color: var(--quiet); }
.tokens .on { background: var(--learnt); color: inherit; }
"""


def page(shown: Sequence[Shown], title: str) -> str:
    sections = "\n".join(_section(one) for one in shown)
    content = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)} · potstill</title>\n'
        f"<style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n"
        "<p><mark>Marked</mark> text is supervised: the student learns to say it.</p>\n"
        f"{sections}\n</body></html>\n"
    )
    return content.encode("utf-8", "replace").decode("utf-8")


def _section(one: Shown) -> str:
    text = "".join(f"<mark>{escape(t)}</mark>" if on else escape(t) for on, t in text_parts(one, len(one.text)))
    readings = "".join(
        f'<p>{escape(_about(reading))}</p><pre class="tokens">{_spans(reading.tokens)}</pre>'
        for reading in one.readings
    )
    return (
        f"<section><h2>{escape(one.where)}</h2><p>supervised text: the {escape(one.writer)}'s</p>"
        f"<pre>{text}</pre>{readings}</section>"
    )


def _spans(tokens: Sequence[Token]) -> str:
    return "".join(
        f"<span{' class=on' if token.supervised else ''}>{escape(token.text)}</span>"
        + ("\n" if token.text.endswith("↵") else "")
        for token in tokens
    )
