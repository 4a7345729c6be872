"""The command line: one thin function a command."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import typer.core
from rich.console import Console

from potstill import __version__
from potstill.cli import options as opt
from potstill.cli.cache import cache_app
from potstill.cli.options import DATA, in_words_of_options, source_of, with_source
from potstill.cli.unforeseen import EXIT_CODE, Unforeseen, explain, stdout_is_gone, traces_in
from potstill.errors import PotstillError

READER_LEFT = 141  # as of a process that SIGPIPE ended


class _Commands(typer.core.TyperGroup):
    """Typer takes some errors for its own (a socket's broken pipe, a file that ends too early): they go past it."""

    def invoke(self, ctx: Any) -> Any:
        with traces_in(None):
            return super().invoke(ctx)


app = typer.Typer(
    name="potstill",
    cls=_Commands,
    help="Distil a teacher language model into a student.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

app.add_typer(cache_app, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error, not only its sentence.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Distil a teacher language model into a student."""
    # What libraries say about themselves would drown what potstill says about the run.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("transformers").setLevel(logging.ERROR)


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="Folder for the two runs and the report.")] = Path("runs/quickstart"),
    seed: Annotated[int, typer.Option(help="Seed of the student's first weights and of the order of the text.")] = 0,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 400,
) -> None:
    """Distil the shipped teacher into a small student and compare it with one trained on the text alone."""
    from potstill.cli.quickstart import quickstart as run_quickstart

    run_quickstart(out, seed=seed, steps=steps)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe; docs/recipe.md lists its keys.")],
    overrides: opt.Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Everything up to the first step; nothing is trained or saved.")
    ] = False,
) -> None:
    """Run a recipe, or go on with it where it stopped; under torchrun over many processes.

    Example: potstill train recipes/distil.yaml train.steps=200 run=runs/short

    Example: torchrun --nproc-per-node 4 -m potstill train recipes/distil.yaml parallel.tp=2
    """
    from potstill import train as run_recipe
    from potstill.config.recipe import load_recipe

    checked = load_recipe(recipe, overrides or [])
    console = Console(soft_wrap=True, quiet=rank() > 0)
    if dry_run:
        from potstill.dry_run import dry_run as run_dry

        run_dry(checked, console)
        return
    with traces_in(Path(checked.run)):
        run = run_recipe(checked)
    if run.stopped_by:
        console.print(
            f"stopped by {run.stopped_by} at step {run.step}; the same command goes on from there", highlight=False
        )
        raise typer.Exit(run.exit_code)
    if rank() == 0:
        console.print(f"student: {run.model}", highlight=False, markup=False)


@app.command()
def preview(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe.")],
    overrides: opt.Overrides = None,
    records: Annotated[int, typer.Option(help="Records of each source, and answers that are written.", min=1)] = 3,
    tokens: Annotated[int, typer.Option(help="Tokens of each that a terminal shows.", min=1)] = 300,
    html: Annotated[Path | None, typer.Option(help="Write a page.")] = None,
    json_out: Annotated[bool, typer.Option("--json", help="Print the records as JSON.")] = False,
) -> None:
    """Show records as text and tokens, with what is supervised, as the student and as each teacher reads them.

    Where the recipe has text written (rollouts), one generation is written and shown too.

    Example: potstill preview recipes/chat.yaml --records 1
    """
    from potstill.cli.preview import preview_recipe
    from potstill.config.recipe import load_recipe

    checked = load_recipe(recipe, overrides or [])
    preview_recipe(checked, recipe.name, records=records, tokens=tokens, html=html, json_out=json_out)


@app.command()
def doctor(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe.")],
    overrides: opt.Overrides = None,
    processes: Annotated[
        int, typer.Option(help="Processes that torchrun will start; default: as many as the recipe asks for.", min=0)
    ] = 0,
    json_out: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Find what would go wrong later, now: models, tokenizers, templates, data, teachers, caches, servers, memory, disk, time.

    One step is taken, in memory. The exit code is 1 if something is wrong.

    Example: potstill doctor recipes/distil.yaml
    """
    from potstill.cli.doctor import doctor_recipe
    from potstill.config.recipe import load_recipe

    if doctor_recipe(load_recipe(recipe, overrides or []), processes, json_out):
        raise typer.Exit(1)


@app.command()
def launch(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe, by the path that it has on every host.")],
    overrides: opt.Overrides = None,
    nodes: Annotated[int, typer.Option(help="Hosts.", min=1)] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs of a host: a process each.", min=1)] = 8,
    scheduler: Annotated[
        Literal["slurm", "torchrun", "kubernetes"],
        typer.Option(
            "--for", help="slurm: a script for sbatch; torchrun: a line for each host; kubernetes: an indexed Job."
        ),
    ] = "torchrun",
    time: Annotated[
        str | None, typer.Option(help="Longest time of a job, [days-]hours:minutes:seconds; of SLURM and Kubernetes.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(help="How often to begin anew at the last checkpoint after a process died.", min=0)
    ] = 3,
    image: Annotated[str | None, typer.Option(help="Kubernetes: container image with potstill installed.")] = None,
    volume: Annotated[
        str | None,
        typer.Option(metavar="CLAIM:/FOLDER", help="Kubernetes: shared volume, with recipe, data and run folder."),
    ] = None,
) -> None:
    """Print what a cluster is given to train a recipe on many GPUs or hosts; nothing is started.

    Example: potstill launch recipes/distil.yaml train.batch_size=256 --nodes 8 --gpus 8 --for slurm --time 24:00:00 > job.sh

    A process that dies ends all, and all begin anew at the last checkpoint. Before its time is over, a job touches RUN/stop:
    the run saves and ends, and the job queues again until RUN/finished is there. A run that ended by a mistake of the recipe's
    or the data's (RUN/error.json) is not started again.
    """
    from potstill.cli.launch import launch as printed

    print(
        printed(
            recipe,
            overrides or [],
            scheduler,
            nodes=nodes,
            gpus=gpus,
            time=time,
            restarts=max_restarts,
            image=image,
            volume=volume,
        ),
        end="",
    )


@app.command(name="eval")
def evaluate(
    model: opt.Model,
    data: Annotated[list[str], typer.Option(help=DATA)],
    teacher: Annotated[
        str | None, typer.Option(help="Measure KL and agreement against this model, server (http://…) or cache folder.")
    ] = None,
    token_env: opt.TokenEnv = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Of the weights; default: float32, and the teacher's as saved."),
    ] = None,
    revision: opt.Revision = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    text: opt.Text = None,
    messages: opt.Messages = None,
    prompt_column: opt.PromptColumn = None,
    completion_column: opt.CompletionColumn = None,
    split: opt.Split = None,
    max_length: Annotated[
        int | None,
        typer.Option(help="Longest window in tokens; default: what the models can read, at most 1024.", min=1),
    ] = None,
    piece_bytes: Annotated[
        int | None, typer.Option(help="Cut texts into pieces of so many bytes; default: 4096.", min=1)
    ] = None,
    examples: Annotated[int | None, typer.Option(help="Use only the first so many examples.", min=1)] = None,
    batch_size: Annotated[int, typer.Option(help="Rows per forward pass.", min=1)] = 8,
    packing: Annotated[bool, typer.Option(help="Several documents a row.")] = True,
    prompt: Annotated[list[str] | None, typer.Option(help="Also complete this beginning; may be repeated.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of the completions.")] = 64,
    tp: Annotated[
        int, typer.Option(help="Under torchrun: matrices of the models are cut over so many processes.", min=1)
    ] = 1,
    shard: Annotated[
        bool, typer.Option(help="Under torchrun: layers of the models are cut over the processes.")
    ] = False,
    device: opt.Device = "auto",
    json_out: opt.Json = False,
) -> None:
    """Bits per byte, perplexity, calibration, and closeness to a teacher, on given text. Under torchrun the text is dealt."""
    options = with_source(locals())
    from potstill.cli.eval import evaluate_model
    from potstill.config import ParallelConfig
    from potstill.parallel.mesh import pick_device, world

    with in_words_of_options(), world(ParallelConfig(tp=tp), pick_device(device)):
        evaluate_model(**options)


@app.command()
def serve(
    model: opt.Model,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0: all of this machine's; ::, with IPv6.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: any that is free.", min=0, max=65535)] = 8471,
    token_env: Annotated[
        str | None, typer.Option(help="Environment variable with the bearer token that clients must send.")
    ] = None,
    dtype: Annotated[opt.AnyDtype, typer.Option(help="Of the model's weights.")] = "auto",
    device: opt.Device = "auto",
    revision: opt.Revision = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    max_body_mb: Annotated[float, typer.Option(help="Largest request.", min=0.001)] = 64.0,
    max_tokens: Annotated[int | None, typer.Option(help="Longest document; default: what the model reads.")] = None,
    max_answer_mb: Annotated[float, typer.Option(help="Largest answer.", min=0.001)] = 1024.0,
    max_memory_mb: Annotated[
        float,
        typer.Option(
            help="Requests and answers held at once; then slow clients make room, or one gets 503.", min=0.001
        ),
    ] = 2048.0,
    max_connections: Annotated[
        int, typer.Option(help="Clients at once; the one that was silent longest makes room.", min=1)
    ] = 512,
    client_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds that a client may be behind 1 Mbit/s, as it sends a request or reads its answer.", min=0.1
        ),
    ] = 30.0,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Without --token-env: a name by which clients reach it, besides localhost, numeric addresses, --host and this "
            "machine's own name; may be repeated; *: any. Others get 421: a web page could have its name resolve here."
        ),
    ] = None,
    batch_tokens: opt.BatchTokens = None,
) -> None:
    """Score text for students that train elsewhere: a teacher as an HTTP server.

    Example: potstill serve shipped:teacher --port 8471
    """
    limits = {name: value for name, value in locals().items() if name.startswith(("max_", "client_", "batch_"))}
    from potstill.serving.server import ServeOptions
    from potstill.serving.server import serve as run_server

    listening = ServeOptions(
        host=host, port=port, token_env=token_env, version=__version__, allowed_hosts=allowed_host or [], **limits
    )
    run_server(
        model,
        listening,
        dtype=dtype,
        device_name=device,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )


@app.command()
def align(
    student: Annotated[
        str, typer.Argument(metavar="A", help="The student's tokenizer: folder, shipped:NAME or hub id.")
    ],
    teacher: Annotated[str, typer.Argument(metavar="B", help="The teacher's.")],
    data: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE]…", help=f"Statistics of a corpus, and its worst places. {DATA}"),
    ] = None,
    text: Annotated[str | None, typer.Option(help="A text to show token by token.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Try the losses on this pair: what must hold, holds.")] = False,
    column: Annotated[str | None, typer.Option(help="With FILE: column with the text.")] = None,
    split: Annotated[str, typer.Option(help="With FILE: split of a data set.")] = "train",
    html: Annotated[Path | None, typer.Option(help="Write a page.")] = None,
    json_out: opt.Json = False,
) -> None:
    """Show how two tokenizers line up, byte by byte.

    Example: potstill align shipped:tokenizers/pieces-1k shipped:tokenizers/bytes-2k --text "The café"
    """
    from potstill.cli.align import align_pair

    source = source_of(data, text=column, split=split) if data else None
    align_pair(student, teacher, source=source, text=text, check=check, html=html, as_json=json_out)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page with the curves, samples, evaluation and recipes of one or more runs."""
    from potstill.report import write_report

    Console(soft_wrap=True).print(f"report: {write_report(runs, out)}", highlight=False, markup=False)


@app.command()
def generate(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe: its data's prompts, its models, its rollouts.sampling.")],
    out: Annotated[Path, typer.Option(help="jsonl to write; the same command again goes on with it.")],
    overrides: opt.Overrides = None,
    by: Annotated[
        Literal["teacher", "student"], typer.Option(help="Who answers: the first teacher, or the student.")
    ] = "teacher",
    answers: Annotated[int, typer.Option(help="Answers to each prompt.", min=1)] = 1,
    limit: Annotated[int | None, typer.Option(help="Prompts at most.", min=1)] = None,
    check: Annotated[
        str | None,
        typer.Option(help="Keep right answers only: exact, math (math-verify), or FILE.py:FUNCTION, given the record."),
    ] = None,
    answer: Annotated[str | None, typer.Option(help="With --check: column with the right answer.")] = None,
    ended: Annotated[bool, typer.Option("--ended", help="Keep only answers that were not cut.")] = False,
    min_tokens: Annotated[int, typer.Option(help="Keep only answers of at least so many tokens.", min=0)] = 0,
    max_tokens: Annotated[int | None, typer.Option(help="Keep only answers of at most so many.", min=1)] = None,
) -> None:
    """Write a teacher's or the student's answers to a data set's prompts as jsonl with log-probabilities, checked and filtered.

    Example: potstill generate recipes/sequence-level.yaml --out runs/answers.jsonl --limit 100 --ended
    """
    from potstill.cli.generate import generate_answers
    from potstill.config.recipe import load_recipe
    from potstill.generation.answers import Asked
    from potstill.generation.checks import Wanted

    wanted = Wanted(check, ended, min_tokens, max_tokens)
    generate_answers(load_recipe(recipe, overrides or []), Asked(out, by, answers, limit, answer, wanted))


@app.command()
def migrate(
    file: Annotated[Path, typer.Argument(help="Another system's configuration, YAML or JSON.")],
    system: Annotated[str, typer.Option("--from", help="Whose it is; docs/migrating.md lists them, with every key.")],
    out: Annotated[Path | None, typer.Option(help="Recipe to write; default: printed.")] = None,
) -> None:
    """Turn another system's configuration into a recipe with comments, and say what was dropped or means something else.

    Example: potstill migrate gkd.yaml --from trl-gkd --out mine.yaml
    """
    from potstill.cli.migrate import migrate_file

    migrate_file(file, system, out)


@app.command()
def config(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe.")],
    overrides: opt.Overrides = None,
) -> None:
    """Print the resolved recipe: every key with its value, references and overrides applied, checked as `train` checks it.

    Example: potstill config recipes/distil.yaml train.steps=200 > mine.yaml
    """
    from potstill.config.recipe import load_recipe, recipe_yaml

    print(recipe_yaml(load_recipe(recipe, overrides or [])), end="")


@app.command()
def schema() -> None:
    """Print the recipe's JSON Schema, for editors that complete and check YAML."""
    from potstill.config.recipe import recipe_schema

    print(recipe_schema())


def main() -> None:
    """The `potstill` command: an error a person can mend is one sentence on stderr, and exit code 1; any other is one too,
    and exit code 70."""
    debug = "--debug" in sys.argv
    try:
        app([argument for argument in sys.argv[1:] if argument != "--debug"])  # so that it may stand anywhere
    except PotstillError as error:
        if debug:
            raise
        if rank() == 0:
            _say(str(error))
        elif not error.shared:  # what all ranks met is said by the first
            _say(f"rank {rank()}: {error}")
        if error.at_once:
            sys.stdout.flush()
            os._exit(1)
        sys.exit(1)
    except Unforeseen as error:
        cause = error.__cause__
        assert cause is not None
        if isinstance(cause, BrokenPipeError) and stdout_is_gone():
            sys.exit(READER_LEFT)
        if debug:
            traceback.print_exception(cause)
        else:
            _say(explain(cause, error.folder, __version__))
        sys.exit(EXIT_CODE)
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit:
        if stdout_is_gone():
            sys.exit(READER_LEFT)
        raise


def rank() -> int:
    """Of this process among those that torchrun started; before any group is made, and after."""
    return int(os.environ.get("RANK") or 0)


def _say(sentence: str) -> None:
    from rich.markup import escape

    # Names and texts of others may hold what a terminal obeys, or what is no character at all.
    shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in sentence)
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(shown)}", highlight=False)
