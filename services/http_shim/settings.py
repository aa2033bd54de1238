"""Settings of the shim."""

import dataclasses

from services.common.log_text import LOG_FORMATS
from services.common.network.addresses import is_loopback, why_closed
from services.common.peers.targets import parse_targets
from services.common.settings import (
    INSTANT,
    LAST_PORT,
    LimitSettings,
    PeerSettings,
    StartupError,
    UsageSettings,
    server_tls,
    setting,
)
from services.http_shim.documentation.page_policy import mcp_origins_of
from services.http_shim.http.cors import origins_of
from services.http_shim.images.remote_urls import AllowedSources
from tokenwire.channel_options import LOST_SECONDS
from tokenwire.tls import ServerTls

__all__ = ["HttpShimSettings", "check"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpShimSettings(PeerSettings, LimitSettings, UsageSettings):
    """Serves the OpenAI API over HTTP, in front of the tokenizer service."""

    host: str = setting(
        "127.0.0.1", "Address to listen on. Other than loopback needs --keys or --open."
    )
    port: int = setting(8000, "Port of the HTTP server; 0 = any free one.", most=LAST_PORT)
    fd: int = setting(
        -1,
        "Inherited listening socket, in place of --host and --port; systemd passes 3. -1 = none.",
        least=-1,
    )
    tls_cert: str = setting("", "Certificate of the HTTP server (PEM); empty = plain HTTP.")
    tls_key: str = setting("", "Key of the certificate (PEM).")
    tls_client_ca: str = setting(
        "", "Authorities that must sign the clients' certificates (PEM); empty = any client."
    )
    open: bool = setting(False, "Serve anyone who reaches the port, without keys.")
    keys: str = setting("", "File of API keys (`tokenwire keys`); empty = requests need no key.")
    tokenizer: str = setting(
        "127.0.0.1:50051",
        "Tokenizer services of the model: host:port or dns:///name:port, several separated by "
        "commas; unused with --catalog.",
    )
    jobs: str = setting(
        "",
        "Jobs service, as host:port, which keeps files, batches, responses and usage and reads "
        "PDFs. Empty = none: those routes answer 501.",
    )
    cors_origins: str = setting(
        "", "Origins whose pages may call the API, separated by commas; * = all; empty = none."
    )
    mcp_origins: str = setting(
        "",
        "Origins of MCP servers whose tools the playground may call from a browser, separated by "
        "commas; empty = none but its own.",
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
    catalog: str = setting("", "TOML file that lists the models; reloaded on SIGHUP.")
    model_manager: str = setting(
        "",
        "host:port of the service that loads the catalog's models on demand, which `tokenwire "
        "serve` starts; empty = none.",
    )
    allowed_hosts: str = setting(
        "",
        "Names that the Host header may have besides loopback's, separated by commas; * = any. "
        "Empty = none on loopback, any elsewhere.",
    )
    trust_scheduling_headers: str = setting(
        "auto",
        "Accept x-priority and x-tenant from clients; auto = on loopback without --keys.",
        choices=("auto", "always", "never"),
    )
    metrics_port: int = setting(
        0, "Port of /metrics; 0 = the HTTP port, -1 = none.", least=-1, most=LAST_PORT
    )
    vllm_metrics: bool = setting(
        False, "Serve the models' load also under vLLM's names, for routers that know them."
    )
    adapter_routes: bool = setting(
        False,
        "Serve /v1/load_lora_adapter and /v1/unload_lora_adapter: clients then name directories of "
        "the engines' machines.",
    )
    ollama: bool = setting(
        False, "Serve Ollama's API below /api, for tools that speak no other (docs/ollama.md)."
    )
    max_body_bytes: int = setting(
        8 * 1024 * 1024, "Largest request body without its images, in bytes.", least=1
    )
    max_held_bytes: int = setting(
        256 * 1024 * 1024,
        "Most bytes of all request bodies until they are decoded, then of their documents until "
        "they are read and of their images until the model accepts the request; the first 64 KiB "
        "of each are not counted. More are refused with 503.",
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
    stall_seconds: float = setting(
        30.0,
        "Seconds without progress in sending or reading after which a client is disconnected.",
        least=INSTANT,
    )
    grace: float = setting(30.0, "Seconds that running requests have after SIGTERM.")
    log_level: str = setting(
        "info", "Least severe log lines.", choices=("debug", "info", "warning", "error")
    )
    log_format: str = setting(
        "auto", "Form of log lines; auto = text on a terminal, else JSON.", choices=LOG_FORMATS
    )
    otlp_endpoint: str = setting(
        "",
        "URL of an OTLP collector (gRPC) for traces; empty = OTEL_EXPORTER_OTLP_ENDPOINT, or none.",
    )

    @property
    def trusts_headers(self) -> bool:
        """True if clients may set the priority and the tenant of their requests."""
        if self.trust_scheduling_headers == "auto":
            return not self.keys and is_loopback(self.host)
        return self.trust_scheduling_headers == "always"

    @property
    def tls(self) -> ServerTls | None:
        """The HTTP server's certificates; None = plain HTTP. Raises StartupError."""
        return server_tls(self.tls_cert, self.tls_key, self.tls_client_ca)

    @property
    def image_sources(self) -> AllowedSources:
        """The hosts that images may be fetched from. Raises ValueError for an invalid list."""
        return AllowedSources(self.fetch_images_from.replace(",", " ").split())


def check(settings: HttpShimSettings) -> None:
    """Raise StartupError for settings that can't be served."""
    if not settings.catalog:
        parse_targets(settings.tokenizer, "--tokenizer")
    if settings.jobs and len(parse_targets(settings.jobs, "--jobs")) > 1:
        raise StartupError("--jobs must name one service: it owns the files of its folder.")
    closed = why_closed(settings.host, has_keys=bool(settings.keys), is_open=settings.open)
    if closed is not None:
        raise StartupError(closed)
    try:
        origins_of(settings.cors_origins)
        mcp_origins_of(settings.mcp_origins)
        _ = settings.image_sources
    except ValueError as error:
        raise StartupError(str(error)) from None
    if settings.fetch_images_from and not settings.fetch_images:
        raise StartupError("--fetch-images-from needs --fetch-images.")
    if settings.max_held_bytes < settings.max_body_bytes:
        raise StartupError(
            "--max-held-bytes must be at least --max-body-bytes, "
            f"{settings.max_body_bytes}, got {settings.max_held_bytes}."
        )
