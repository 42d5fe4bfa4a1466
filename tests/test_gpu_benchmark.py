"""The script for a GPU runs, made tiny, wherever the tests do."""

import keras
import scripts


def test_the_script_for_a_gpu_runs_tiny_and_every_path_is_near(tmp_path):
    arguments = ["--tiny", "--backends", keras.backend.backend(), "--out", "GPU.md"]
    done = scripts.run("benchmarks/gpu.py", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    page = (tmp_path / "GPU.md").read_text(encoding="utf-8")
    rows = [line.split("|")[2:4] for line in page.splitlines() if "| paths" in line]
    for word in ("failed", "left out", "BEYOND", "nan"):
        assert word not in page, page
    for what in ("TFLOP/s", "reloaded on a CPU", "step, 2 x 12", "decode, 16 rows"):
        assert what in page
    ((_, differences),) = rows
    numbers = [
        float(word.strip(","))
        for pair in differences.split(";")
        for word in pair.split(":")[1].replace("gradient", "").split()
    ]
    assert len(numbers) == 22 and max(numbers) < 0.03
