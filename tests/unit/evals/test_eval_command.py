"""`potstill eval`: what --data means, the options of the model, and errors in the command line's own words."""

import json

import pytest
from served import Served
from tiny import CPU, tiny
from typer.testing import CliRunner

from potstill.cli.main import app
from potstill.cli.options import source_of
from potstill.config import DataConfig, TeacherConfig
from potstill.evals.fidelity import evaluate
from potstill.models import load_teacher
from potstill.teachers.live import live_teacher
from potstill.types import PotstillError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    student = tiny(0)
    student.model.save_pretrained(folder / "model")
    student.tokenizer.save_pretrained(folder / "model")
    (folder / "texts.jsonl").write_text('{"text": "The people of the union."}\n')
    return folder


def test_a_name_with_a_dot_is_a_data_set_unless_it_is_a_file(tmp_path):
    assert source_of(["org/data-v1.5"], split="test") == {"dataset": "org/data-v1.5", "split": "test"}
    odd = tmp_path / "texts.v2"
    odd.write_text("x")
    for files in (["a.jsonl", "b.jsonl.gz"], ["a.parquet"], ["data-v1.*"], ["shipped:corpus"], [str(odd)]):
        assert source_of(files) == {"files": files}
    with pytest.raises(PotstillError, match=r"org/data-v1\.5 is a data set and can only be given alone"):
        source_of(["a.txt", "org/data-v1.5"])


def test_dtype_is_that_of_both_models(folder, monkeypatch):
    from potstill.cli import eval as command

    loaded = {}
    real = command.evaluate

    def evaluate(student, teacher, *rest, **options):
        loaded.update(student=student.model.dtype, teacher=teacher.source.language_model.model.dtype)
        return real(student, teacher, *rest, **options)

    monkeypatch.setattr(command, "evaluate", evaluate)
    line = ["eval", f"{folder}/model", "--data", f"{folder}/texts.jsonl", "--teacher", f"{folder}/model", "--json"]
    said = CliRunner().invoke(app, [*line, "--dtype", "bfloat16", "--device", "cpu"], catch_exceptions=False)
    assert json.loads(said.stdout)["agreement"] == 1
    assert {str(dtype) for dtype in loaded.values()} == {"torch.bfloat16"}
    assert CliRunner().invoke(app, [*line, "--dtype", "float16"]).exit_code == 2


def test_revision_and_remote_code_reach_the_models(folder, monkeypatch):
    from potstill.cli import eval as command

    class Seen(Exception):
        pass

    def load_student(config, device, seed, key):
        raise Seen(config.model, config.revision, config.trust_remote_code)

    monkeypatch.setattr(command, "load_student", load_student)
    line = ["eval", "org/model", "--data", f"{folder}/texts.jsonl", "--revision", "v2", "--trust-remote-code"]
    assert CliRunner().invoke(app, line).exception.__cause__.args == ("org/model", "v2", True)


@pytest.mark.parametrize(
    ("model", "teacher", "says"),
    [
        ("./none", "model", "MODEL: cannot load ./none: there is no such folder"),
        ("model", "./none", "--teacher: cannot load ./none: there is no such folder"),
    ],
)
def test_errors_name_the_argument(folder, monkeypatch, model, teacher, says):
    monkeypatch.chdir(folder)
    said = CliRunner().invoke(app, ["eval", model, "--data", "texts.jsonl", "--teacher", teacher, "--device", "cpu"])
    assert str(said.exception) == says


def said_of(*words) -> dict:
    said = CliRunner().invoke(app, ["eval", *map(str, words), "--device", "cpu", "--json"], catch_exceptions=False)
    result = json.loads(said.stdout)
    assert result.pop("samples") == []
    return result


@pytest.fixture(scope="module")
def other(folder):
    other = tiny(1)
    other.model.save_pretrained(folder / "other")
    other.tokenizer.save_pretrained(folder / "other")
    (folder / "long.jsonl").write_text(
        "".join(json.dumps({"text": f"{i} people of the union. " * 9}) + "\n" for i in range(6))
    )
    return folder / "other"


def test_a_teacher_behind_a_server_gives_the_kl_of_the_model(folder, other):
    """StepBatches too: they are asked about in their own tokens."""
    words = [folder / "model", "--data", folder / "long.jsonl", "--max-length", 16]
    live = said_of(*words, "--teacher", other)
    with (
        Served(other, "--token-env", "SERVED", env={"SERVED": "sesame"}) as served,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("ASKING", "sesame")
        remote = said_of(*words, "--teacher", served.address, "--token-env", "ASKING")
    assert live["kl"] > 0.01
    assert remote == pytest.approx(live, rel=1e-4)
    assert remote["bytes"] == (folder / "long.jsonl").stat().st_size - 6 * 13


def test_a_cache_as_teacher_gives_the_kl_of_what_it_holds(folder, other):
    from potstill.cache.build import build
    from potstill.cache.origin import LiveOrigin
    from potstill.config import StoreConfig
    from potstill.data import StepBatches

    data = DataConfig.model_validate({"sources": [{"files": str(folder / "long.jsonl")}], "piece_bytes": 150})
    loaded = load_teacher(TeacherConfig(model=str(other)), CPU, "x")
    build(LiveOrigin(loaded, "other"), StoreConfig(kind="hidden"), data, folder / "cache")
    words = [folder / "model", "--data", folder / "long.jsonl", "--max-length", 128, "--packing"]
    cached = said_of(*words, "--teacher", folder / "cache")
    # Another way: the same text as it is trained on, the teacher's model beside it.
    student = load_teacher(TeacherConfig(model=str(folder / "model")), CPU, "x")
    whole = data.model_copy(update={"max_length": 128})
    windows = StepBatches(whole, student.tokenizer, batch_size=8, micro_batch_size=8, seed=0, epochs=1)
    batches = [batch for window in windows for batch in window.batches]
    expected = evaluate(student, live_teacher(loaded, 2048, "other"), batches, CPU)
    assert cached["kl"] == pytest.approx(expected["kl"], rel=2e-3)
    assert cached["bytes"] == (folder / "long.jsonl").stat().st_size - 6 * 13
    said = CliRunner().invoke(
        app, ["eval", *map(str, words[:1]), "--data", f"{folder}/texts.jsonl", "--teacher", f"{folder}/cache"]
    )
    assert str(said.exception) == (
        "--teacher: the cache has none of the 1 held-out examples; add them with `potstill cache build`, in pieces of 150 "
        "bytes as the rest of it is"
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--max-length", "500"],
            "--max-length is 500 and {0}/model has 128 positions: set --max-length to 128 or less",
        ),
        (["--max-length", "1"], "--max-length: 1 leaves no room for a token and one before it"),
        (["--text", "words"], "--text: "),
        (["--shard", "--prompt", "The"], "--prompt goes without --tp and --shard: leave one of them out"),
        (["--tp", "2"], "parallel: dp_replicate 1 × dp_shard 1 × cp 1 × tp 2 are 2 ranks, and there is 1"),
    ],
)
def test_errors_name_the_options(folder, options, says):
    line = ["eval", f"{folder}/model", "--data", f"{folder}/texts.jsonl", "--device", "cpu", *options]
    assert str(CliRunner().invoke(app, line).exception).startswith(says.format(folder))


def test_there_must_be_something_to_score(folder):
    (folder / "empty.jsonl").write_text('{"text": ""}\n')
    said = CliRunner().invoke(app, ["eval", f"{folder}/model", "--data", f"{folder}/empty.jsonl", "--device", "cpu"])
    assert str(said.exception).startswith("--data: nothing to ")
