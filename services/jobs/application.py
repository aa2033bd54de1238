"""Lifecycle of the jobs service."""

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import suppress

import grpc

from services.common.accounts.account import Account
from services.common.background import keep_running
from services.common.server import Application
from services.common.settings import StartupError
from services.common.telemetry import describe_build
from services.jobs.answering import ShimAnswering, check
from services.jobs.batch_service import BatchServicer
from services.jobs.batches.batch_runner import BatchRunner
from services.jobs.documents.document_reader import DocumentReader
from services.jobs.documents.documents import Documents
from services.jobs.file_service import FileServicer
from services.jobs.local_jobs import LocalJobs
from services.jobs.response_service import ResponseServicer
from services.jobs.responses.responses import Responses, fail_interrupted
from services.jobs.settings import JobsSettings
from services.jobs.store.database_guard import StoreUnavailableError
from services.jobs.store.file_store import FileStore
from services.jobs.store.response_store import ResponseStore
from services.jobs.store.usage_store import UsageStore
from services.jobs.usage_service import UsageServicer
from tokenwire.errors import ServiceError
from tokenwire.pb.jobs.v1 import jobs_pb2
from tokenwire.pb.jobs.v1.jobs_pb2_grpc import (
    add_BatchServiceServicer_to_server,
    add_FileServiceServicer_to_server,
    add_ResponseServiceServicer_to_server,
    add_UsageServiceServicer_to_server,
)

__all__ = ["JobsApplication"]

_DAY = 24 * 60 * 60
_CHECK_SECONDS = 1.0
"""Time after which the files of the stores are looked for"""
_END_SECONDS = 10.0
"""Longest wait for the ends of responses that were aborted"""
_SERVICES = [service.full_name for service in jobs_pb2.DESCRIPTOR.services_by_name.values()]


class JobsApplication(Application):
    """The stores, the runner of batches, and the responses in the background."""

    peer_methods = frozenset(
        {
            "/tokenwire.jobs.v1.ResponseService/PutResponse",
            "/tokenwire.jobs.v1.UsageService/RecordUsage",
        }
    )

    def __init__(self, settings: JobsSettings) -> None:
        """Open the stores. Raises StartupError if one, or a setting, is unusable."""
        super().__init__()
        check(settings)
        self._files = _file_store(settings)
        self._responses_store = _response_store(settings)
        reader = Documents(DocumentReader(), self._files, settings.max_held_bytes)
        local = LocalJobs(reader)
        self._usage = _usage_store(settings)
        self.ledger.report = self._usage.record_later
        self._answering = ShimAnswering(settings, local, self._account, self.ledger)
        self._responses = local.responses = Responses(
            self._responses_store,
            self._answering,
            settings.max_background,
            settings.max_event_bytes,
        )
        self._runner = BatchRunner(
            self._files,
            self._answering,
            self._account,
            settings.max_body_bytes,
            settings.max_output_bytes,
        )
        self._file_servicer = FileServicer(
            self._files, reader, settings.max_file_bytes, settings.stall_seconds
        )
        self._response_servicer = ResponseServicer(self._responses, settings.heartbeat_seconds)
        self._checking: asyncio.Task[None] | None = None

    @property
    def model(self) -> str:
        return ""

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        add_FileServiceServicer_to_server(self._file_servicer, server)
        add_BatchServiceServicer_to_server(BatchServicer(self._files, self._runner), server)
        add_ResponseServiceServicer_to_server(self._response_servicer, server)
        add_UsageServiceServicer_to_server(UsageServicer(self._usage), server)
        return _SERVICES

    async def start(self) -> None:
        """Run the batches that have not ended. Models may come later."""
        describe_build("jobs")
        self._checking = keep_running("stores", self._check_stores)
        self._runner.start()
        self.set_serving(True)

    async def drain(self) -> None:
        """Stop the batches, which go on after the next start; wait for running responses."""
        await self._runner.stop()
        await self._responses.drain()

    async def stop(self) -> None:
        await self._runner.stop()
        await self._answering.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await self._responses.drain()
        if self._checking is not None:
            self._checking.cancel()
        await self.ledger.close()
        self._usage.close()
        self._responses_store.close()
        self._files.close()

    async def _check_stores(self) -> None:
        """Note stores whose files are gone, and those that are there again."""
        while True:
            for store in (self._files, self._responses_store, self._usage):
                await asyncio.to_thread(store.guard.check)
            await asyncio.sleep(_CHECK_SECONDS)

    def _account(self, identity: str) -> Account | None:
        """Return the account of a key by its id; None without one. Raises ServiceError."""
        if not identity:
            return None
        if self.keyring is None:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "NO_KEYS",
                "The jobs service has no file of API keys: start it with the --keys of the server "
                "that calls it.",
            )
        try:
            return self.keyring.account_by_id(identity)
        except ServiceError:  # the caller may have read the changed file earlier
            self.keyring.reload_if_changed()
            return self.keyring.account_by_id(identity)


def _file_store(settings: JobsSettings) -> FileStore:
    try:
        return FileStore(settings.file_folder, settings.max_files_bytes)
    except (OSError, sqlite3.Error, StoreUnavailableError) as error:
        folder = settings.file_folder
        raise StartupError(f"--file-folder {folder} can't be used: {error}.") from None


def _response_store(settings: JobsSettings) -> ResponseStore:
    """Open the store; responses that an earlier process did not end are failed."""
    path = settings.response_store
    try:
        store = ResponseStore(path, settings.max_response_bytes, settings.response_days * _DAY)
        fail_interrupted(store)
        return store
    except (sqlite3.Error, StoreUnavailableError) as error:
        raise StartupError(f"--response-store {path} can't be opened: {error}.") from None


def _usage_store(settings: JobsSettings) -> UsageStore:
    path = settings.usage_store
    try:
        return UsageStore(path, settings.usage_days)
    except (sqlite3.Error, StoreUnavailableError) as error:
        raise StartupError(f"--usage-store {path} can't be opened: {error}.") from None
