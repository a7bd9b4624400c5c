"""Generates texts with another engine, for scripts/bench.py: `python bench_worker.py genai|llama.cpp SETTINGS`.

A process of its own, so that the thread pools of two engines never meet. It says what it loaded, then answers one line of JSON
with another until its input ends. It imports nothing of this project.
"""

import json
import os
import signal
import sys
import time

_NGRAM_SIZE = 2


class GenaiEngine:
    """ONNX Runtime GenAI on folders of export/genai_config.py."""

    def __init__(self, settings):
        """Loads the target alone, and again with its draft where there is a folder for the pair: one model cannot be both."""
        import onnxruntime_genai as genai

        self._genai = genai
        self._plain = genai.Model(settings["plain"])
        self._pair = genai.Model(settings["pair"]) if settings["pair"] else None
        self.facts = {"version": genai.__version__}

    def run(self, request):
        """Returns the new tokens, times, and the engine's own counts."""
        import numpy as np

        drafter, prompt, new_tokens = request["drafter"], request["prompt"], request["max_new_tokens"]
        started = time.perf_counter()
        params = self._genai.GeneratorParams(self._pair if drafter == "model" else self._plain)
        # Behind the last token, a round still writes what it proposes, and the graph's spare row.
        room = 0 if drafter == "off" else request["num_draft_tokens"] + 1
        params.set_search_options(max_length=len(prompt) + new_tokens + room, **self._sampling(request))
        if drafter != "off":
            lookup = {"ngram_size": _NGRAM_SIZE} if drafter == "lookup" else {}
            params.set_speculative_options(max_draft_tokens=request["num_draft_tokens"], **lookup)
        generator = self._genai.Generator(self._pair if drafter == "model" else self._plain, params)
        generator.append_tokens(np.array([prompt], np.int32))
        generator.generate_next_token()
        first = time.perf_counter()
        stats = generator.get_speculative_stats()
        first_tokens = stats["tokens_queued"] if stats["rounds"] else 1
        # A first step without a round chooses from the prompt's own pass; a first round takes one more.
        passes = 1 - stats["standard_fallback_steps"]
        while not generator.is_done() and generator.token_count() - len(prompt) < new_tokens:
            generator.generate_next_token()
        ended = time.perf_counter()
        tokens = [int(token) for token in generator.get_sequence(0)][len(prompt) :]
        times = {"first_seconds": first - started, "whole_seconds": ended - started, "first_tokens": first_tokens}
        return {"tokens": tokens, **times, "work": self._work(drafter, generator.get_speculative_stats(), passes, new_tokens)}

    def _sampling(self, request):
        if request["temperature"] == 0:
            return {"do_sample": False}
        rules = {"temperature": request["temperature"], "top_k": request["top_k"], "top_p": 1.0}
        return {"do_sample": True, "random_seed": request["seed"], **rules}

    def _work(self, drafter, stats, passes, new_tokens):
        if drafter == "off":
            counts = {"target_passes": new_tokens, "draft_passes": 0, "rounds": new_tokens, "proposed": 0, "accepted": 0}
        else:
            steps = stats["standard_fallback_steps"]
            counts = {
                "target_passes": passes + stats["target_forward_passes"] + steps,
                "draft_passes": stats["draft_forward_passes"] + (drafter == "model"),
                "rounds": stats["rounds"] + steps,
                "proposed": stats["draft_tokens_proposed"],
                "accepted": stats["draft_tokens_accepted"],
            }
        return {**counts, "python_seconds": None}


class LlamaEngine:
    """llama.cpp on a GGUF file, plain."""

    def __init__(self, settings):
        """Loads the file."""
        import llama_cpp

        threads = {"n_threads": settings["threads"], "n_threads_batch": settings["threads"]}
        self._llama = llama_cpp.Llama(settings["file"], n_ctx=settings["max_length"], verbose=False, **threads)
        self.facts = {"version": llama_cpp.__version__, "vocab_size": self._llama.n_vocab()}

    def run(self, request):
        """Returns the new tokens and times."""
        self._llama.set_seed(request["seed"])
        started = time.perf_counter()
        self._llama.reset()
        rules = {"temp": request["temperature"], "top_k": request["top_k"], "top_p": 1.0, "min_p": 0.0}
        stream = self._llama.generate(request["prompt"], **rules)
        tokens = [next(stream)]
        first = time.perf_counter()
        while len(tokens) < request["max_new_tokens"]:
            tokens.append(next(stream))
        ended = time.perf_counter()
        stream.close()
        times = {"first_seconds": first - started, "whole_seconds": ended - started, "first_tokens": 1}
        passes = {"target_passes": len(tokens), "draft_passes": 0, "rounds": len(tokens), "proposed": 0, "accepted": 0}
        return {"tokens": tokens, **times, "work": {**passes, "python_seconds": None}}


def main():
    """Serves until the input ends."""
    if len(sys.argv) != 3:
        sys.exit("error: bench_worker.py is started by scripts/bench.py, with what it is to load: run that.")
    # Ctrl-C reaches the whole group; whoever asks decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    engines = {"genai": GenaiEngine, "llama.cpp": LlamaEngine}
    engine = engines[sys.argv[1]](json.loads(sys.argv[2]))
    print(json.dumps(engine.facts), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
