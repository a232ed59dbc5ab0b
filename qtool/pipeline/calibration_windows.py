"""Makes the token windows of a run from the user's calibration data.

Windows are cut from a text, or started by a text and continued by the model itself, long ones in
pieces; the recipe or ``--windows`` says which. They are drawn once and stored in the run's
directory, so that a resumed run reads them.
"""

import gc
import hashlib
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from qtool.data import corpora
from qtool.data.calibration_input import TokenIds
from qtool.data.chat import render
from qtool.data.continuation import Journal, continued
from qtool.data.mix import CalibrationMix, Part, facts, interleave, parse_mix
from qtool.data.windows import bos_of, cut, token_ids
from qtool.distributed import ranks
from qtool.errors import QtoolError, in_one_line
from qtool.io.output import Output
from qtool.io.safetensors import read
from qtool.io.source import Checkpoint
from qtool.models.auto import text_model
from qtool.pipeline.free_memory import gpu_memory, host_memory
from qtool.pipeline.job import Job
from qtool.pipeline.options import QuantizeOptions
from qtool.pipeline.planning.memory import (
    BATCH_TOKENS,
    DEVICE_SHARE,
    HOST_SHARE,
    ROUNDED_SCHEME,
    ContinuationMemory,
    continuation_memory,
)
from qtool.pipeline.quantize import Calibration, fingerprint
from qtool.pipeline.rounded_model import load_rounded
from qtool.recipes.schema import CONTINUED
from qtool.runtime.load import load, load_tokenizer

#: the name of the windows in the run's directory
STORED = "windows"
#: most bytes of keys and values with which the journal stores windows that are half drawn: on a GPU
#: those with more are drawn in about the time that the journal would take to write
JOURNAL_BYTES = 4 << 30


class Windows:
    """Calibration windows, drawn when a run starts (:meth:`for_run`) or by :attr:`drawn`.

    Args:
        text: a corpus's name, a file, texts, token ids or a data set
            (:mod:`qtool.data.calibration_input`), or a mix of them (:mod:`qtool.data.mix`).
        options: ``samples``, ``seqlen``, ``seed`` and ``data_dir`` are used.

    Attributes:
        facts: the data by its content and the user's choices, which identify an unfinished run;
            those of :attr:`drawn` and :meth:`for_run` name the data and describe what was found.
        found_in: the directory of local corpora that the user names, for the record alone: another
            one may hold the same.
        output: the run in whose directory a continuation keeps its journal; None before
            :meth:`for_run`, so that windows drawn without a run keep none.

    Raises:
        QtoolError: ``text`` is no calibration data.
    """

    def __init__(
        self,
        source: Checkpoint,
        job: Job,
        text: CalibrationMix,
        options: QuantizeOptions,
        device: str,
    ) -> None:
        self.source, self.job, self.device = source, job, torch.device(device)
        self.parts = parse_mix(text, options.samples, data_dir=options.data_dir)
        self.found_in = {"data_dir": str(options.data_dir)} if options.data_dir else {}
        self.requested_seqlen, self.seed = options.seqlen, options.seed
        rows = [part.data.ids for part in self.parts if isinstance(part.data, TokenIds)]
        given = [ids.shape[1] for ids in rows if ids.dim() == 2]
        self.seqlen = min([job.window(options.seqlen), *given])
        self.output: Output | None = None
        self.how = {"seqlen": self.seqlen, "seed": self.seed, "windows": job.recipe.windows}
        taken = [{"content": part.content, "samples": part.samples} for part in self.parts]
        self.facts: dict[str, Any] = {"parts": taken, **self.how}

    @cached_property
    def drawn(self) -> Calibration:
        """The windows in batches; the first of several ranks draws them."""
        return ranks.broadcast(self._draw() if ranks.rank() == 0 else Calibration())

    def for_run(self, output: Output) -> Calibration:
        """The windows of the run in ``output``: new ones are stored in its directory.

        Raises:
            QtoolError: there is no text, the text is shorter than a window, the tokenizer belongs
                to another model, or a model that must continue the windows does not fit.
        """
        if kept := ranks.broadcast(output.kept(STORED) if ranks.rank() == 0 else None):
            entries, facts = kept
            return _batches(read(entries[STORED]), facts)
        self.output = output
        drawn = self.drawn
        if ranks.rank() == 0:
            ids = torch.cat(list(drawn.tokens))
            output.keep(STORED, {STORED: ids}, [(STORED, ids)], drawn.facts)
            for name in output.kept_names(f"{CONTINUED}-"):
                output.drop(name)
        return drawn

    def _draw(self) -> Calibration:
        """The windows, cut from the text or continued by the model, with their facts."""
        if self.seqlen < self.requested_seqlen:
            ranks.log(
                f"calibration windows have {self.seqlen} tokens, not {self.requested_seqlen}: "
                "the model's context or the given token ids are shorter"
            )
        windows, found = [], []
        for part in self.parts:
            ids, sha256 = self._cut(part)
            if len(ids) < part.samples:
                ranks.log(
                    f"{part.data.name} holds {len(ids)} of the {part.samples} requested windows of "
                    f"{self.seqlen} tokens"
                )
            windows.append(ids)
            found.append((part.data.name, len(ids), sha256))
        ids, how = interleave(windows), {}
        if self.job.recipe.windows == CONTINUED:
            need = self._continuation(ids)
            ids = self._continued(ids, need)
            how = {"continued_by": ROUNDED_SCHEME} if need.rounded else {}
        drawn = _batches(ids, {**facts(found), **self.how, **self.found_in, **how})
        return Calibration(drawn.tokens, {**drawn.facts, "tokens": fingerprint(drawn.tokens)})

    def _cut(self, part: Part) -> tuple[Tensor, str]:
        """Windows of a part's text or token ids, and its sha256."""
        how: dict[str, Any] = {
            "samples": part.samples,
            "seqlen": self.seqlen,
            "vocabulary": self.job.namespace.vocab_size,
            "seed": self.seed,
            "name": part.data.name,
        }
        if isinstance(part.data, TokenIds):
            return cut(part.data.ids, **how), part.data.sha256
        tokenizer = load_tokenizer(self.source.directory)
        rows = part.data.read()
        text = corpora.joined(render(rows, tokenizer, part.data.name))
        special = not rows or isinstance(rows[0], str)  # a chat begins with what its template says
        ids = token_ids(text, tokenizer, how["vocabulary"], add_special_tokens=special)
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        return cut(ids, **how, bos=bos_of(ids, tokenizer)), sha256

    def _continuation(self, ids: Tensor) -> ContinuationMemory:
        """The memory and the pieces with which the model continues the windows ``ids``.

        Raises:
            QtoolError: the device or the host has no room for the whole model.
        """
        on_gpu = self.device.type == "cuda"
        whole, free = gpu_memory(self.device) if on_gpu else host_memory()
        usable = min((DEVICE_SHARE if on_gpu else HOST_SHARE) * whole, free)
        need = continuation_memory(self.job, len(ids), ids.shape[1], self.device, whole)
        if short := need.shortage(self.device, usable, HOST_SHARE * host_memory()[1]):
            raise QtoolError(
                f"the recipe has windows: continued, and to continue calibration windows {short}"
            )
        return need

    def _continued(self, ids: Tensor, need: ContinuationMemory) -> Tensor:
        """The windows ``ids``, with each of their pieces continued by the model from its start.

        Raises:
            QtoolError: the device ran out of memory.
        """
        began = time.monotonic()
        prompts = ids.reshape(-1, need.length)[:, : need.given]
        journal = None
        if self.output is not None:
            journal = OutputJournal(self.output, need, str(self.device), prompts)
        try:
            pieces = continued(
                self._model(need),
                prompts,
                need.length,
                seed=self.seed,
                batch_size=need.batch_size,
                journal=journal,
            )
        except torch.OutOfMemoryError as error:
            raise QtoolError(
                f"{self.device} ran out of memory ({in_one_line(error)}) while the "
                "model continued calibration windows: free memory, or pass --windows given for "
                "windows that are all of the text"
            ) from error
        gc.collect()  # a model has reference cycles, and the run needs its memory
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        ranks.log(
            f"{len(ids)} window{'s' * (len(ids) != 1)} of {ids.shape[1]} tokens, of each "
            f"{need.length} the first {need.given} of the text and the rest by the model{need.how} "
            f"({time.monotonic() - began:.0f} s)"
        )
        return pieces.reshape(ids.shape)

    def _model(self, need: ContinuationMemory) -> Any:
        """The model that continues windows."""
        if need.rounded:
            last = need.pieces % need.batch_size or need.batch_size
            counts = [n * each for n in (need.batch_size, last) for each in (need.given, 1)]
            return text_model(load_rounded(self.source, self.device, counts))
        dtype = None if self.device.type == "cuda" else torch.float32
        return text_model(load(self.source, device=str(self.device), dtype=dtype))


class OutputJournal(Journal):
    """The journal of a continuation in a run's directory.

    An entry of half drawn windows is due a second after the last one, or later if entries take long
    to write, and never if their cache has more than :data:`JOURNAL_BYTES`. Entries that were drawn
    with another ``need``, on another ``device`` or after other ``prompts`` are dropped: a run is
    resumed with a corpus of the same name, whatever its text is now.
    """

    def __init__(
        self, output: Output, need: ContinuationMemory, device: str, prompts: Tensor
    ) -> None:
        self.output = output
        self.facts = {
            "at_once": need.batch_size,
            "rounded": need.rounded,
            "device": device,
            "prompts": fingerprint([prompts]),
        }
        self.entries, self.next = 0, time.monotonic() + 1
        self.takes_halves = need.cache <= JOURNAL_BYTES

    def read(self) -> Iterator[dict[str, Tensor]]:
        names = self.output.kept_names(f"{CONTINUED}-")
        for name in names:
            kept = self.output.kept(name)
            if name != self._next_name() or kept is None or kept[1] != self.facts:
                break  # the later entries follow one that is missing
            yield {key: read(entry) for key, entry in kept[0].items()}
            self.entries += 1
        for name in names[self.entries :]:
            self.output.drop(name)

    def due(self) -> bool:
        return self.takes_halves and time.monotonic() > self.next

    def append(self, entry: Mapping[str, Tensor]) -> None:
        began = time.monotonic()
        self.output.keep(self._next_name(), entry, entry.items(), self.facts, sync=False)
        self.entries += 1
        now = time.monotonic()
        self.next = now + max(1, 4 * (now - began))

    def _next_name(self) -> str:
        return f"{CONTINUED}-{self.entries:06d}"


def _batches(ids: Tensor, facts: Mapping[str, Any]) -> Calibration:
    """Windows ``[n, seqlen]`` in batches of about :data:`BATCH_TOKENS` tokens."""
    return Calibration(list(ids.split(max(1, BATCH_TOKENS // ids.shape[1]))), facts)
