"""`potstill eval`: what --data means, the options of the model, and errors in the command line's own words."""

import json

import pytest
from tiny import tiny
from typer.testing import CliRunner

from potstill.cli import app
from potstill.evals.command import source_of
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
    from potstill.evals import command

    loaded = {}
    real = command.evaluate

    def evaluate(student, teacher, *rest):
        loaded.update(student=student.model.dtype, teacher=teacher.language_model.model.dtype)
        return real(student, teacher, *rest)

    monkeypatch.setattr(command, "evaluate", evaluate)
    line = ["eval", f"{folder}/model", "--data", f"{folder}/texts.jsonl", "--teacher", f"{folder}/model", "--json"]
    said = CliRunner().invoke(app, [*line, "--dtype", "bfloat16", "--device", "cpu"], catch_exceptions=False)
    assert json.loads(said.stdout)["agreement"] == 1
    assert {str(dtype) for dtype in loaded.values()} == {"torch.bfloat16"}
    assert CliRunner().invoke(app, [*line, "--dtype", "float16"]).exit_code == 2


def test_revision_and_remote_code_reach_the_models(folder, monkeypatch):
    from potstill.evals import command

    class Seen(Exception):
        pass

    def load_student(config, device, seed, key):
        raise Seen(config.model, config.revision, config.trust_remote_code)

    monkeypatch.setattr(command, "load_student", load_student)
    line = ["eval", "org/model", "--data", f"{folder}/texts.jsonl", "--revision", "v2", "--trust-remote-code"]
    assert CliRunner().invoke(app, line).exception.args == ("org/model", "v2", True)


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
