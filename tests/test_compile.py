"""torch.compile takes the whole model as one graph, for every encoding and every way of stretching."""

from compile_all import CASES
from conftest import run_program


def test_compiled_equals_eager_for_every_encoding():
    done = run_program("tests/compile_all.py")
    assert done.returncode == 0, done.stderr[-2000:]
    differences = [line.split() for line in done.stdout.splitlines()]
    assert [(position, kind) for position, kind, _ in differences] == CASES
    assert all(float(size) < 1e-5 for *_, size in differences), done.stdout
