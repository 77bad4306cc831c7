"""lm-eval: log-likelihoods of choices and texts generated up to a stop string, of a task in a local file."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

# A question has whole tokens of four bytes, so that each choice has tokens of its own.
QUESTIONS = [f"So how many are {number} and {number}?" for number in range(8)]
DOCUMENTS = [{"question": text, "choices": ["two", "many", "0"], "answer": 1} for text in QUESTIONS]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {output}
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
{more}
metadata: {{version: 1}}
"""
KINDS = {
    "choices": ("multiple_choice", "doc_to_choice: choices\nmetric_list: [{metric: acc}, {metric: acc_norm}]"),
    "texts": ("generate_until", "generation_kwargs: {until: [a]}\nmetric_list: [{metric: exact_match}]"),
}


def main(url: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"HF_HOME": folder, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
        import lm_eval
        from lm_eval.tasks import TaskManager

        data = Path(folder, "documents.jsonl")
        data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
        for name, (output, more) in KINDS.items():
            Path(folder, f"{name}.yaml").write_text(TASK.format(name=name, data=data, output=output, more=more))
        tasks = TaskManager(include_path=folder, include_defaults=False)
        arguments = {"model": model, "base_url": f"{url}/v1/completions", "num_concurrent": 4, "max_retries": 1}
        evaluated = lm_eval.simple_evaluate(
            "local-completions",
            model_args=arguments | {"tokenizer_backend": "remote"},
            tasks=list(KINDS),
            task_manager=tasks,
            log_samples=True,
            bootstrap_iters=0,
        )
    assert 0 <= evaluated["results"]["choices"]["acc,none"] <= 1
    for sample in evaluated["samples"]["choices"]:
        values = [float(answer[0][0]) for answer in sample["resps"]]
        assert len(values) == 3
        assert all(value < 0 for value in values)
        assert len(set(values)) == 3, "different choices have different log-likelihoods"
    texts = [sample["resps"][0][0] for sample in evaluated["samples"]["texts"]]
    assert len(texts) == len(DOCUMENTS)
    assert not any("a" in text for text in texts), "no text goes beyond its stop string"


if __name__ == "__main__":
    main(*sys.argv[1:])
