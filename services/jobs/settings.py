"""Settings of the jobs service, from flags and environment variables."""

from dataclasses import dataclass

from services.common.settings import (
    LAST_PORT,
    LimitSettings,
    PeerSettings,
    StreamSettings,
    UsageSettings,
    setting,
)
from tokenwire.channel_options import LOST_SECONDS

__all__ = ["JobsSettings"]


@dataclass(frozen=True, kw_only=True)
class JobsSettings(StreamSettings, PeerSettings, LimitSettings, UsageSettings):
    """Tokenwire's jobs service: files, batches, kept responses and responses in the background."""

    port: int = setting(50054, "Port of the gRPC server; 0 = any free one.", most=LAST_PORT)
    tokenizer: str = setting(
        "127.0.0.1:50051",
        "Tokenizer services of the model: host:port or dns:///name:port, several separated by "
        "commas; unused with --catalog.",
    )
    catalog: str = setting("", "TOML file that lists the models; reloaded on SIGHUP.")
    model_manager: str = setting(
        "",
        "host:port of the service that loads the catalog's models on demand, which `tokenwire "
        "serve` starts; empty = none.",
    )
    tokenizer_wait: float = setting(
        60.0, "Seconds that new requests wait for a tokenizer service that restarts."
    )
    max_waiting: int = setting(
        1024, "Most new requests that wait for a tokenizer service; more are refused."
    )
    lost_seconds: float = setting(
        LOST_SECONDS, "Seconds of silence after which a tokenizer service counts as lost.", least=1
    )
    max_body_bytes: int = setting(
        8 * 1024 * 1024, "Largest request without its images, in bytes.", least=1
    )
    max_held_bytes: int = setting(
        256 * 1024 * 1024,
        "Most bytes of all requests until they are decoded, then of their images until the model "
        "accepts the request, and as many of the documents until they are read; more are refused.",
        least=1,
    )
    max_kept_image_bytes: int = setting(
        256 * 1024 * 1024,
        "Most bytes of the images of running requests, which continue with them if a tokenizer "
        "service is lost; the oldest are dropped first.",
    )
    fetch_images: bool = setting(
        False, "Fetch images that requests give as http(s) URLs, from hosts with public addresses."
    )
    fetch_images_from: str = setting(
        "",
        "Hosts that images are fetched from, separated by commas: host, host:port or *.host; empty "
        "= any, at the ports 80 and 443.",
    )
    response_store: str = setting(
        "", "SQLite file of the responses of /v1/responses; empty = they are kept in memory."
    )
    max_response_bytes: int = setting(
        64 * 1024 * 1024, "Most bytes of kept responses; the oldest are dropped first."
    )
    response_days: float = setting(30.0, "Days that responses are kept.", least=0)
    max_background: int = setting(
        64, "Most responses of /v1/responses that run in the background; more are refused."
    )
    max_event_bytes: int = setting(
        64 * 1024 * 1024,
        "Most bytes of the kept events of streamed responses in the background; the oldest are "
        "dropped first.",
    )
    usage_store: str = setting(
        "", "SQLite file of the usage of API keys; empty = it is kept in memory."
    )
    usage_days: int = setting(
        400, "Days that usage is kept; at least the current month.", least=31, most=36_500
    )
    file_folder: str = setting(
        "",
        "Folder of the files and batches of /v1/files and /v1/batches; empty = a temporary one, "
        "which ends with the server.",
    )
    max_file_bytes: int = setting(200 * 1024 * 1024, "Largest uploaded file, in bytes.", least=1)
    max_files_bytes: int = setting(
        2 * 1024**3, "Most bytes of all files; further ones are refused.", least=1, most=2**50
    )
    max_output_bytes: int = setting(
        512 * 1024**2,
        "Most bytes of a batch's answers and errors; a batch with more fails.",
        least=1,
        most=2**50,
    )
