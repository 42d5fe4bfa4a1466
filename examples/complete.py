"""Talks to a saved language model of characters: type a beginning, watch it go on.

    python examples/train_char_lm.py
    python examples/complete.py model.keras
    python examples/complete.py model.keras --text corpus.txt --temperature 0.7

Text streams as it is generated. An empty line, Ctrl-D or Ctrl-C ends the session;
Ctrl-C while text streams only ends that text. The alphabet says which character
is which token: a JSON list of characters, by default the `characters.json` that
`train_char_lm.py` puts beside its model, or the sorted characters of a text.
"""

import argparse
import json
import pathlib
import sys

import keras

import keras_tx as tx


def read_alphabet(options):
    """Returns the characters, in the order of their tokens."""
    if options.text:
        return sorted(set(pathlib.Path(options.text).read_text("utf-8")))
    beside = pathlib.Path(options.model).parent / "characters.json"
    return list(json.loads(pathlib.Path(options.alphabet or beside).read_text("utf-8")))


def encode(text, alphabet):
    """Returns tokens and the characters that the model does not know."""
    number = {character: index for index, character in enumerate(alphabet)}
    unknown = sorted(set(text) - set(number))
    return [number[x] for x in text if x in number], unknown


def complete(model, text, alphabet, options, write):
    """Streams what follows `text` through `write`, a character at a time."""
    tokens, unknown = encode(text, alphabet)
    if unknown:
        write(f"[left out, unknown to the model: {''.join(unknown)!r}]\n")
    if not tokens:
        return
    write(text)
    sampler = [options.temperature, tx.TopP(options.top_p)]
    for token in tx.stream(
        model, tokens, options.length, sampler=sampler, seed=options.seed
    ):
        write(alphabet[token] if token < len(alphabet) else "\N{REPLACEMENT CHARACTER}")
    write("\n")


def session(model, alphabet, options, read=input, write=None):
    """Reads beginnings until there are no more."""

    def show(text):
        sys.stdout.write(text)
        sys.stdout.flush()

    write = write or show
    while True:
        try:
            text = read("> ")
        except (EOFError, KeyboardInterrupt):
            return
        if not text:
            return
        try:
            complete(model, text, alphabet, options, write)
        except KeyboardInterrupt:
            write("\n")


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a .keras file")
    alphabet = parser.add_mutually_exclusive_group()
    alphabet.add_argument("--alphabet", help="JSON list of characters")
    alphabet.add_argument("--text", help="text that the model was trained on")
    parser.add_argument("--length", type=int, default=200, help="characters to add")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, help="the same text every time")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    model = keras.saving.load_model(options.model, compile=False)
    session(model, read_alphabet(options), options)


if __name__ == "__main__":
    main()
