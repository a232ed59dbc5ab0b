"""lm-eval's own command line with native checkpoints: ``python -m qtool.lm_eval run ...``.

Everything after the module's name is lm-eval's. Neither transformers nor lm-eval looks for plugins
among the installed packages, so this imports qtool's quantizer and then calls lm-eval:

    python -m qtool.lm_eval run --model hf --model_args pretrained=DIR,dtype=auto --tasks piqa

``qtool eval`` gives the same log-likelihoods on the same batch size where ``--model_args`` has
``softmax_dtype=float32`` too. A task that is in the directory ``QTOOL_DATA_DIR`` is read from there
as ``qtool eval`` reads it (:mod:`qtool.eval.local_tasks`), unless a group brings it.
"""

import sys
from typing import Any

from qtool import plugins
from qtool.errors import QtoolError


def main() -> None:
    """Register the quantizer with transformers and the local tasks with lm-eval, and run lm-eval.

    If ``QTOOL_DATA_DIR`` names no directory or a plugin fails, a sentence says so and no task runs.
    """
    from lm_eval import tasks
    from lm_eval.__main__ import cli_evaluate

    from qtool.eval import local_tasks
    from qtool.runtime import huggingface  # noqa: F401  (registers the quantizer)

    try:
        plugins.load()  # transformers looks a model's class up first
        files = local_tasks.local_tasks(None)
    except QtoolError as error:
        sys.exit(f"qtool: {error}")

    class TaskManager(tasks.TaskManager):
        @property
        def all_tasks(self) -> list[str]:
            return [*files, *super().all_tasks]

        def load(self, task_list: Any) -> Any:
            given = task_list if isinstance(task_list, list) else [task_list]
            return super().load([self._local(task) for task in given])

        def _local(self, task: Any) -> Any:
            path = files.get(task) if isinstance(task, str) else None
            return local_tasks.load(task, path, lambda: self) if path else task

    tasks.TaskManager = TaskManager
    cli_evaluate()


if __name__ == "__main__":
    main()
