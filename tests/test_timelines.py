"""Which files `terapipe simulate` and `terapipe view` take for programs, and what they say of others."""
import json

import pytest

import terapipe_c as tp
from terapipe_c import cli


def seconds(capsys, path, *words):
    assert cli.main(["simulate", str(path), *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["makespan_s"]


def test_a_program_is_read_from_text_and_csv_of_any_system(capsys, tmp_path):
    program = tp.schedules.one_f_one_b(2, 3)
    for name, text in (("p.txt", str(program)), ("p", str(program)), ("p.csv", program.to_csv()), ("P.CSV", program.to_csv())):
        for end in ("\n", "\r\n"):
            (tmp_path / name).write_bytes(text.replace("\n", end).encode())
            assert seconds(capsys, tmp_path / name) == program.simulate({"F": 1.0, "B": 2.0}).makespan_s, (name, end)
    plain = seconds(capsys, tmp_path / "p", "--fwd", "3", "--bwd", "5", "--comm", "0.25")
    assert plain == program.simulate({"F": 3.0, "B": 5.0}, comm_s=0.25).makespan_s


@pytest.mark.parametrize("name, text, words", [
    ("p.txt", b"0F0.0 0F0.0 0B0.0", "p.txt is neither a plan nor a program: "),       # it can be read, but not be run
    ("p.txt", b"0F0,0B0", "p.txt is neither a plan nor a program: "),                  # of CSV, by another name
    ("p.csv", b"what,is\nthis", "p.csv is neither a plan nor a program: "),
    ("p.txt", b"\xff\xfe", "p.txt is neither a plan nor a program: byte 0 is no UTF-8"),
    ("p.txt", b"", "p.txt is neither a plan nor a program: "),
    ("p.json", b'  {"format": "other"}', "p.json is not a plan"),
])
def test_what_is_no_program_is_named_once(capsys, tmp_path, name, text, words):
    (tmp_path / name).write_bytes(text)
    for command in ("simulate", "view"):
        assert cli.main([command, str(tmp_path / name)]) == 2
        told = capsys.readouterr()
        assert words in told.err and told.err.count(name) == 1 and told.out == "", told.err
