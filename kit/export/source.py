"""The source of an export: a run, a checkpoint, a ``final/`` folder, an adapter, or a model."""

import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kit.checkpoint.manifest import MANIFEST, read_state
from kit.config.adapter_base import saved_adapter_type
from kit.config.recipe import Recipe
from kit.config.settings.method import MethodSettings
from kit.data.chat.template import resolve_template
from kit.export.card import model_card, state_of
from kit.export.proof import Rows, find_rows
from kit.model.adapters.token_rows import num_rows
from kit.model.build import build_meta_model, check_model, open_config
from kit.model.pretrained.classes import auto_class
from kit.model.pretrained.heads import template_beside, with_head
from kit.model.pretrained.locate import base_of_adapter, hint_final
from kit.model.pretrained.tokenizer import open_tokenizer
from kit.run.model_source import run_of
from kit.run.record import RUN_FILE, Texts, read_run, read_texts, with_model_of_checkpoint
from kit.strategy.topology import ActualStrategy
from kit.system.errors import UserError, raise_if
from kit.train.loop_state import LoopState


@dataclass(frozen=True)
class Source:
    """What is exported."""

    settings: MethodSettings  # they open the model, or the unquantised base with its adapter
    checkpoint: Path | None  # to load into that model; None: ``settings`` open it with its weights
    run_file: Path | None  # ``run.json`` of the run; None: it is not known how the model was trained
    name: str  # for files that are named after it

    @property
    def is_model(self) -> bool:
        """Whether it is a full model already."""
        return self.checkpoint is None and self.settings.method == "full"

    @cached_property
    def run(self) -> Recipe | None:
        """The recipe of the run, with the base where it is now; None: it is not known how the model was trained."""
        if self.run_file is None:
            return None
        return read_run(self.run_file)[0].model_copy(update={"model_name_or_path": self.settings.model_name_or_path})

    @cached_property
    def texts(self) -> Texts:
        """What is known of the texts that the run trained on."""
        return read_texts(self.run_file)

    @property
    def strategy(self) -> ActualStrategy | None:
        """The strategy of the run; None: not known."""
        return read_run(self.run_file)[1] if self.run_file else None

    @property
    def state(self) -> LoopState:
        """The state of the run in the checkpoint, or at its end."""
        if self.checkpoint:
            return LoopState.from_record(read_state(self.checkpoint, LoopState().record()))
        return state_of(self.run_file.parent) if self.run_file else LoopState()

    @cached_property
    def config(self) -> Any:
        """The config of the model, or of the base."""
        config = open_config(self.settings)
        if (run := self.run) and run.declared.head != "lm":
            return with_head(config, run, run.model_name_or_path, run.max_length)
        return config

    @property
    def loader(self) -> Any:
        """The class of transformers that opens the model, or the base."""
        return auto_class(self.config)

    @cached_property
    def meta_model(self) -> Any:
        """The model, or the base, on the meta device. Raises ``UserError``: its files do not fit each other."""
        model = build_meta_model(self.settings, self.config)
        problems = check_model(self.settings, self.config, model)
        raise_if(replace(p, where="adapter") if p.where == "adapter_name_or_path" else p for p in problems)
        return model

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, with the chat template of the run: beside a model it is that of its folder."""
        tokenizer = open_tokenizer(self.settings)
        if self.checkpoint and (run := self.run):
            template = resolve_template(tokenizer, run.chat_template, run.chat_template_kwargs)
            tokenizer.chat_template = template_beside(run.declared.head, template, self.texts.form)
        return tokenizer

    @cached_property
    def rows(self) -> Rows:
        """What models are compared on."""
        return find_rows(self.run, self.tokenizer, num_rows(self.meta_model))

    def card(self, **more: Any) -> str:
        """Return the model card. ``more`` are arguments of ``model_card``."""
        about = {"text_form": self.texts.form, "loader": self.loader.__name__, **more}
        return model_card(self.run or self.settings, self.strategy, self.state, self.tokenizer, **about)


def find_source(path: Path, base: str | None, trust_remote_code: str) -> Source:
    """Find out what ``path`` is, and how to open it.

    Args:
        base: where the base is now, if it is no longer at its own path.
        trust_remote_code: "true" or "false".

    Raises:
        UserError: it is nothing that can be exported.
    """
    source = Path(os.path.realpath(path.expanduser()))
    if os.path.isfile(source / RUN_FILE) and os.path.isdir(source / "final"):
        source /= "final"
    # Weights are read and merged, or a few sequences computed, so the kernel of attention does not matter.
    how = {"attn_implementation": "eager", "trust_remote_code": trust_remote_code}
    run_file = run_of(str(source))
    name = source.parent.name if source.name == "final" else source.name
    name = re.sub(r"[^\w.-]+", "-", name)
    if os.path.isfile(source / "adapter_config.json"):
        base = base or base_of_adapter(source)
        names = {"model_name_or_path": base, "adapter_name_or_path": str(source), "method": "lora"}
        names |= {"adapter_type": saved_adapter_type(str(source))}
        return Source(MethodSettings.model_validate(names | how), None, run_file, name)
    if os.path.isfile(source / MANIFEST):
        settings = MethodSettings.model_validate({"model_name_or_path": base or str(source)} | how)
        settings = with_model_of_checkpoint(settings, source, "checkpoint", base)
        method = "full" if settings.method == "full" else "lora"
        # Plain weights are written.
        settings = settings.model_copy(update={"method": method, "qat": None, "qat_group_size": None})
        run_folder = source.parents[1]
        return Source(settings, source, run_folder / RUN_FILE, f"{run_folder.name}-{source.name}")
    if os.path.isfile(source / "config.json"):
        settings = MethodSettings.model_validate({"model_name_or_path": str(source), "method": "full"} | how)
        return Source(settings, None, run_file, name)
    found = f"no {MANIFEST}, no adapter_config.json, no config.json"
    expected = "a run, a complete checkpoint, an adapter or a model"
    raise UserError(str(path), found, expected, hint_final(path))
