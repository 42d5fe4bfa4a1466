"""Runs the notebooks from top to bottom and keeps what they show.

    pip install -e ".[tensorflow,notebooks]"
    python notebooks/run.py            # all of them
    python notebooks/run.py 01 03      # some, by the beginning of their name

Each runs in a kernel and an empty folder of its own, on TensorFlow, and its
outputs are written back into the file. Pictures of cells that are tagged
`picture:NAME` also go to `figures/NAME.png`, for the README.

`tests/test_notebooks.py` runs the same cells without a kernel and keeps nothing.
"""

import argparse
import base64
import os
import pathlib
import tempfile

# Kernels inherit these: one backend, errors only, pictures that go into cells.
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"

FOLDER = pathlib.Path(__file__).parent.resolve()


def run(path):
    """Executes one notebook and writes its outputs back."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            kernel_name="python3",
            timeout=600,
            record_timing=False,
            # What C++ libraries say of this machine belongs in the terminal.
            extra_arguments=["--IPKernelApp.capture_fd_output=False"],
            resources={"metadata": {"path": folder}},
        ).execute()
    # Versions of this machine would change the file, and nothing that it says.
    notebook.metadata = {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
    }
    nbformat.validate(notebook)
    nbformat.write(notebook, path)
    return notebook


def keep_pictures(notebook):
    """Writes the pictures of tagged cells, and returns their paths."""
    kept = []
    for cell in notebook.cells:
        names = [
            tag.removeprefix("picture:")
            for tag in cell.metadata.get("tags", [])
            if tag.startswith("picture:")
        ]
        for name in names:
            (picture,) = (
                output.data["image/png"]
                for output in cell.outputs
                if "image/png" in output.get("data", {})
            )
            path = FOLDER / "figures" / f"{name}.png"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(base64.b64decode(picture))
            kept.append(path)
    return kept


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("beginnings", nargs="*", metavar="NAME", help="e.g. 01 03")
    options = parser.parse_args(arguments)
    paths = sorted(FOLDER.glob("*.ipynb"))
    if options.beginnings:
        paths = [p for p in paths if p.name.startswith(tuple(options.beginnings))]
    if not paths:
        parser.error(f"no notebook begins with {' or '.join(options.beginnings)}")
    for path in paths:
        print(path.name, flush=True)
        for picture in keep_pictures(run(path)):
            print(f"  {picture.relative_to(FOLDER)}", flush=True)


if __name__ == "__main__":
    main()
