"""Writes the reference files under `tests/pretrained`, with `transformers`.

    python tests/make_pretrained_references.py

Needs torch and `transformers`. The files are committed, so that the tests need
neither; run this only to add a case, and commit what changed.
"""

import os
import sys

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from pretrained_cases import (
    CASES,
    minilm_folder,
    smollm2_file,
    write_case,
    write_minilm,
    write_smollm2,
)

if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        write_case(name)
        print(name)
    if minilm_folder() is not None:
        write_minilm()
        print("minilm")
    if smollm2_file() is not None:
        write_smollm2()
        print("smollm2")
