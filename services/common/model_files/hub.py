"""Checkpoints of a Hugging Face hub, in the cache that huggingface_hub keeps.

The variables of huggingface_hub apply: HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from services.common.model_files.mmproj_file import is_mmproj
from services.common.model_files.quantisation import (
    QuantisationError,
    choose_file,
    choose_mmproj,
    quantisation_of,
    quantisations_of,
)
from services.common.model_files.resumed_download import (
    DownloadedFileError,
    fetch_large_files,
    require_space,
)

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

    from services.common.model_files.download_progress import Report

__all__ = ["HubCheckpoint", "HubError"]

_PREFIX = "hf:"
_NAME = re.compile(r"hf:(\w[\w.-]*/\w[\w.-]*)(?:/([^@]+\.gguf)|:([\w.-]+))?(?:@(.+))?", re.ASCII)
_PART = re.compile(r"-\d{5}-of-(\d{5}\.gguf)$")
_NEEDED = (
    *("*.safetensors", "*.json", "*.jinja"),
    *("tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt"),
    *("colbert_linear.pt", "sparse_linear.pt"),
)
"""Patterns of the files that the services read; BGE-M3's heads are the only pickles"""
_CARD = "README.md"
"""Card of the model, which states its licence; a repository without one is complete, too"""
_WEIGHTS = (".safetensors", ".gguf")
_LEFT_OUT = (
    # subfolders hold the same weights for other programs, except 1_Pooling and adapters
    *("[!0-9a]*/*.safetensors", "[!0-9a]*/*.json", "a[!d]*/*.safetensors", "a[!d]*/*.json"),
    "consolidated*",  # a second copy of the weights in Mistral's repositories
)


class HubError(Exception):
    """The hub or its cache does not have the checkpoint. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class HubCheckpoint:
    """A repository of the hub, at one of its revisions."""

    repository: str
    """Name of the repository, owner/name"""
    file: str | None
    """GGUF file in the repository; None = its safetensors files"""
    revision: str | None
    """Branch, tag or commit; None = the main branch"""
    quantisation: str | None = None
    """Quantisation whose GGUF file is meant, in any case; None = not stated"""
    mmproj: str | None = None
    """File with the vision tower of the GGUF file's model; None = there is none, or not known"""

    @staticmethod
    def is_named_by(text: str) -> bool:
        """Return whether the text names a checkpoint of a hub, rather than a file."""
        return text.startswith(_PREFIX)

    @staticmethod
    def parse(text: str) -> "HubCheckpoint":
        """Read hf:owner/name, hf:owner/name/FILE.gguf or hf:owner/name:Q4_K_M, or with @revision.

        Raises HubError.
        """
        match = _NAME.fullmatch(text)
        if match is None:
            raise HubError(
                "A model of the hub is named hf:owner/name, hf:owner/name/FILE.gguf or "
                f"hf:owner/name:Q4_K_M, with or without @revision, not {text}."
            )
        repository, file, quantisation, revision = match.groups()
        return HubCheckpoint(repository, file, revision, quantisation)

    def __str__(self) -> str:
        file = f"/{self.file}" if self.file else ""
        kind = f":{self.quantisation}" if self.quantisation else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{_PREFIX}{self.repository}{file}{kind}{revision}"

    @property
    def _wanted(self) -> list[str]:
        """Patterns of the files to download."""
        if self.file is None:
            return list(_NEEDED)
        parts = _PART.sub(r"-*-of-\1", self.file)
        return [parts] if self.mmproj is None else [parts, self.mmproj]

    def on_disk(self) -> Path | None:
        """Return the directory or GGUF file in the cache; None unless all of it is there.

        The hub is not asked. Where the name leaves several GGUF files, the most sensible one of
        those in the cache is meant.
        """
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        folder = self._snapshot()
        if folder is None:
            return None
        try:
            chosen = self._chosen_of(_names_below(folder))
            made = snapshot_download(
                self.repository,
                revision=self.revision,
                allow_patterns=chosen._wanted,
                ignore_patterns=list(_LEFT_OUT),
                local_files_only=True,
            )
        except (LocalEntryNotFoundError, QuantisationError):
            return None
        path = Path(made, chosen.file or "")
        has_weights = path.is_file() or any(path.glob("*.safetensors"))
        return path if has_weights else None

    def cached(self) -> Path:
        """Return the directory or file in the cache. Raises HubError unless it is complete."""
        path = self.on_disk()
        if path is None:
            raise HubError(
                f"{self} is not in the cache of the hub; `tokenwire pull {self}` downloads it."
            )
        return path

    def chosen(self) -> "HubCheckpoint":
        """Return the checkpoint with the GGUF file that its quantisation names.

        A repository that has GGUF files alone gets the most sensible one, and a line on stderr says
        so. The most sensible mmproj file comes with any GGUF file. Without a connection, the cache
        decides. Raises HubError.
        """
        with self._explained():
            names = self._names()
        try:
            chosen = self._chosen_of(names)
        except QuantisationError as error:
            raise HubError(str(error)) from None
        if chosen.file is not None and self.quantisation is None and self.file is None:
            there = ", ".join(quantisations_of(_ggufs(names)))
            which = quantisation_of(chosen.file) or chosen.file
            print(
                f"{self.repository} has GGUF files alone ({there}): taking {which}. "
                f"{self.repository}:QUANTISATION names another.",
                file=sys.stderr,
            )
        return chosen

    def download(self, folder: Path | None = None, report: "Report | None" = None) -> Path:
        """Download the files that are not in the cache yet, and return the directory or file.

        folder: directory to use in place of the cache. Without a connection the cache must have
        all files. report: gets the progress; None = a bar on a terminal shows it. Raises HubError.
        """
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars

        bars = None
        if report is not None:
            from services.common.model_files.download_progress import reporting_bars

            bars = reporting_bars(self.missing_bytes(), report)
        elif not sys.stderr.isatty():
            disable_progress_bars()
        with self._explained():
            if not constants.HF_HUB_OFFLINE:
                missing = self._announce()
                require_space(missing, folder or Path(constants.HF_HUB_CACHE))
                fetch_large_files(self.repository, missing, self._cache_folder / "blobs", folder)
            made = snapshot_download(
                self.repository,
                revision=self.revision,
                allow_patterns=self._wanted if self.file else [*self._wanted, _CARD],
                ignore_patterns=list(_LEFT_OUT),
                local_dir=folder,
                tqdm_class=bars,
            )
        return Path(made, self.file or "")

    def download_config(self) -> Path | None:
        """Download config.json alone; return None if there is none, or if the weights are GGUF.

        Raises HubError.
        """
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError
        from huggingface_hub.utils.tqdm import disable_progress_bars

        if self.file is not None:
            return None
        disable_progress_bars()
        with self._explained():
            try:
                return Path(hf_hub_download(self.repository, "config.json", revision=self.revision))
            except EntryNotFoundError:
                return None

    def missing_bytes(self) -> int:
        """Return the bytes that a download would fetch; 0 without a connection. Raises HubError."""
        return sum(file.file_size or 0 for file in self._wanted_files() if file.will_download)

    def weight_bytes(self) -> int:
        """Return the total bytes of the weights; 0 without a connection. Raises HubError."""
        files = self._wanted_files()
        return sum(file.file_size or 0 for file in files if file.filename.endswith(_WEIGHTS))

    def _wanted_files(self) -> "list[DryRunFileInfo]":
        """Return the files of a download; none without a connection. Raises HubError."""
        from huggingface_hub.errors import DryRunError
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        with self._explained():
            try:
                return self._listed(self._wanted)
            except DryRunError:
                return []

    def _chosen_of(self, names: list[str]) -> "HubCheckpoint":
        """Return the checkpoint with a file of these. Raises QuantisationError."""
        ggufs = _ggufs(names)
        tower = choose_mmproj(ggufs)
        if self.file is not None:
            is_model = self.file in ggufs and not is_mmproj(Path(self.file))
            return replace(self, mmproj=tower if is_model else None)
        has_safetensors = any(name.endswith(".safetensors") for name in names)
        if self.quantisation is None and (has_safetensors or not ggufs):
            return self
        file = choose_file(self.repository, ggufs, self.quantisation)
        return replace(self, file=file, quantisation=None, mmproj=tower)

    def _names(self) -> list[str]:
        """Return the names of the repository's files, or without a connection of those on disk."""
        import httpx2
        from huggingface_hub import HfApi
        from huggingface_hub.errors import OfflineModeIsEnabled

        try:
            # list_repo_files repeats a failed request for half a minute, and logs each time
            info = HfApi().model_info(self.repository, revision=self.revision)
            return [file.rfilename for file in info.siblings or ()]
        except (OfflineModeIsEnabled, httpx2.TransportError):
            folder = self._snapshot()
            return [] if folder is None else _names_below(folder)

    @property
    def _cache_folder(self) -> Path:
        """Folder of the repository in the cache."""
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        name = repo_folder_name(repo_id=self.repository, repo_type="model")
        return Path(constants.HF_HUB_CACHE, name)

    def _snapshot(self) -> Path | None:
        """Return the folder of the revision in the cache, which may lack files."""
        from huggingface_hub import constants

        folder = self._cache_folder
        revision = self.revision or constants.DEFAULT_REVISION
        reference = folder / "refs" / revision
        commit = reference.read_text().strip() if reference.is_file() else revision
        snapshot = folder / "snapshots" / commit
        return snapshot if snapshot.is_dir() else None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the hub, of its cache and of the disk into HubError."""
        import httpx2
        from huggingface_hub import constants
        from huggingface_hub.errors import (
            GatedRepoError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        try:
            yield
        except GatedRepoError:
            raise HubError(
                f"{self} is only for users whom its owners accept: ask for access on its page, and "
                "set HF_TOKEN to a token of your account."
            ) from None
        except RepositoryNotFoundError:
            raise HubError(
                f"The hub has no model {self.repository} that you may read; a private one needs "
                "HF_TOKEN."
            ) from None
        except RevisionNotFoundError:
            raise HubError(f"{self.repository} has no revision {self.revision}.") from None
        except LocalEntryNotFoundError:
            raise HubError(
                f"The hub can't be reached, and its cache does not have all of {self}."
            ) from None
        except DownloadedFileError as error:
            raise HubError(str(error)) from None
        except (httpx2.TransportError, httpx2.InvalidURL) as error:
            why = str(error).rstrip(".") or type(error).__name__
            raise HubError(f"The hub {constants.ENDPOINT} did not answer: {why}.") from None
        except (OSError, ValueError) as error:  # the disk, an HTTP response, or the name
            why = " ".join(str(error).split()).rstrip(".")
            raise HubError(f"{self} can't be downloaded: {why}.") from None

    def _announce(self) -> "list[DryRunFileInfo]":
        """Print the size of the download, and return its files; none without a connection.

        Raises HubError if the repository has no weights.
        """
        from huggingface_hub.errors import DryRunError

        try:
            files = self._listed(self._wanted)
            if not any(file.filename.endswith(_WEIGHTS) for file in files):
                ggufs = [Path(file.filename) for file in self._listed(["*.gguf"])]
                raise HubError(self._without_weights([f for f in ggufs if not is_mmproj(f)]))
        except DryRunError:
            return []  # without a connection, the cache may still have everything
        missing = [file for file in files if file.will_download]
        if missing:
            size = f"{sum(file.file_size or 0 for file in missing) / 1e9:.2f} GB"
            count = "1 file" if len(missing) == 1 else f"{len(missing)} files"
            print(f"Downloading {self}: {count}, {size}", file=sys.stderr)
        return missing

    def _listed(self, patterns: list[str]) -> "list[DryRunFileInfo]":
        """Return the files of the repository whose names match a pattern."""
        from huggingface_hub import snapshot_download

        return snapshot_download(
            self.repository,
            revision=self.revision,
            allow_patterns=patterns,
            ignore_patterns=list(_LEFT_OUT),
            dry_run=True,
        )

    def _without_weights(self, ggufs: list[Path]) -> str:
        if not ggufs:
            return f"{self} has no safetensors and no GGUF files; docs/models.md says what is read."
        names = " or ".join(f"hf:{self.repository}/{file}" for file in sorted(ggufs)[:3])
        return f"{self} does not exist; name one of its {len(ggufs)} files, such as {names}."


def _names_below(folder: Path) -> list[str]:
    return [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]


def _ggufs(names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(".gguf")]
