"""Options of `tokenwire serve`, and the error of a stack that can't be served."""

from dataclasses import dataclass
from pathlib import Path

from services.common.model_files.keep_alive import DEFAULT_KEEP_ALIVE
from services.common.network.addresses import LAST_PORT, address, reachable

__all__ = ["LogPlace", "ServeError", "ServeOptions", "require_port"]

_LONGEST_GRACE = 2**31 - 1
"""Largest --grace in seconds, the same as that of the services"""
_MOST_REPLICAS = 64
_MOST_TEXT_PROCESSES = 16
"""Most tokenizer services, or shims"""
_LEAST_CACHE, _MOST_CACHE = 256 * 2**20, 4 * 2**30
"""Bytes of the KV cache of a model on demand"""
_CACHE_SHARE = 8
"""Part of --memory that the KV cache of a model on demand takes, within these bounds"""


class ServeError(Exception):
    """Stack that can't start (`exit_code` 2) or can't continue (1). The message is one sentence."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of `tokenwire serve`. Raises ServeError for numbers out of range."""

    host: str = "127.0.0.1"
    port: int = 8000
    tokenizer_port: int = 50051
    engine_port: int = 50052
    grammar_port: int = 50053
    jobs_port: int = 50054
    no_jobs: bool = False
    """Start no jobs service: files, batches, kept responses and PDFs are then refused"""
    model: Path | None = None
    """Directory of a checkpoint, or GGUF file; None = the embedded one"""
    model_id: str = ""
    """Name under which the model is served; empty = the directory's name"""
    chat_template: Path | None = None
    """File (Jinja) of the model's default chat template; None = the checkpoint's"""
    models: tuple[Path, ...] | None = None
    """Folders whose models are loaded when requests name them; None = none"""
    memory: int = 0
    """Bytes that the models on demand may take together; 0 = a share of what is free"""
    max_loaded: int = 64
    """Models on demand in memory, at most"""
    keep_alive: float = DEFAULT_KEEP_ALIVE
    """Seconds that a model on demand stays in memory after its last use; infinity = for ever"""
    load_timeout: float = 600.0
    """Longest wait of a request for the load of its model, in seconds"""
    manager_port: int = 50055
    packed_size: int = 16 * 2**30
    """Bytes of the packed weights of models on demand that are kept on the disk; 0 = none"""
    packed_cache: Path | None = None
    """Folder of these weights; None = they are not kept"""
    no_spare: bool = False
    """Prepare no processes for the next model on demand"""
    catalog: Path | None = None
    """Models to serve instead; their services get free ports from `tokenizer_port` upwards"""
    keys: Path | None = None
    """API keys of HTTP and gRPC; with them, gRPC is served beyond loopback only with `plaintext`"""
    peer_token_file: Path | None = None
    """Token that the services show each other; None = none, or with keys one of their own"""
    limits_url: str = ""
    """Redis that counts the limits of keys for several servers; empty = this one counts alone"""
    plaintext: bool = False
    """Serve gRPC beyond loopback although keys then cross the network in clear text"""
    dtype: str = "auto"
    engine_args: str = ""
    """Additional engine flags, quoted as in a shell"""
    service_flags: tuple[str, ...] = ()
    """Further flags; each service gets those that it has"""
    replicas: int = 1
    """Engines of the model; a row of a catalog has its own number"""
    tokenizers: int = 0
    """Tokenizer services of a model that is not on demand; 0 = one, or more before a GPU"""
    shims: int = 0
    """Shims, which share the HTTP port; 0 = one, or more before a GPU"""
    no_restart: bool = False
    """Stop the stack when one of its services ends, instead of starting that one again"""
    open: bool = False
    """Allow a host beyond loopback without API keys"""
    cors_origins: str = ""
    """Origins whose web pages may use the API, separated by commas; "*" = all"""
    allowed_hosts: str = ""
    """Host names that HTTP requests may use besides those of loopback, separated by commas"""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    """Certificate and key of the HTTP server (PEM); None = plain HTTP"""
    grace: float = 30.0
    """Seconds that running requests may take when the stack stops"""
    otlp_endpoint: str = ""
    """URL of the OTLP collector that the services send traces to; empty = standard variables"""
    log_format: str = "auto"
    """Form of the log lines on stderr: json, text, or auto = text on a terminal"""
    log_dir: Path | None = None
    """Directory of a log file per service; None = stderr"""
    log_size: int = 64 * 2**20
    """Bytes at which a log file is full and a new one begins; 0 = no limit"""

    @property
    def scheme(self) -> str:
        """Scheme of the HTTP server's URL."""
        return "http" if self.tls_cert is None else "https"

    @property
    def url(self) -> str:
        """URL of the HTTP server, as this machine reaches it."""
        return f"{self.scheme}://{address(reachable(self.host), self.port)}"

    @property
    def serves_catalog(self) -> bool:
        """True if the server may have several models."""
        return self.catalog is not None or self.models is not None

    @property
    def manager_target(self) -> str:
        """Address of the manager of models on demand; only services of this machine call it."""
        return f"127.0.0.1:{self.manager_port}"

    @property
    def counts_limits_alone(self) -> bool:
        """True if each service that knows the API keys counts their limits for itself."""
        return self.keys is not None and not self.limits_url

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache of a model on demand."""
        return min(max(self.memory // _CACHE_SHARE, _LEAST_CACHE), _MOST_CACHE)

    @property
    def logs(self) -> "LogPlace | None":
        """Folder and size of the log files; None = the services log to stderr."""
        return None if self.log_dir is None else LogPlace(self.log_dir, self.log_size)

    @property
    def grpc_host(self) -> str:
        """Address of the tokenizer services, the engines and the jobs."""
        # API keys in clear text, which a proxy may keep from HTTP, need consent of their own
        is_allowed = self.keys is None or self.open or self.plaintext
        return self.host if is_allowed else "127.0.0.1"

    def __post_init__(self) -> None:
        require_port("--port", self.port)
        require_port("--tokenizer-port", self.tokenizer_port)
        require_port("--engine-port", self.engine_port)
        require_port("--grammar-port", self.grammar_port)
        require_port("--jobs-port", self.jobs_port)
        require_port("--manager-port", self.manager_port)
        if self.max_loaded < 1:
            raise ServeError(f"--max-loaded must be at least 1, not {self.max_loaded}.")
        if not 1 <= self.load_timeout <= _LONGEST_GRACE:
            raise ServeError(f"--load-timeout must be at least 1, not {self.load_timeout:g}.")
        if not 0 <= self.grace <= _LONGEST_GRACE:
            raise ServeError(f"--grace must be between 0 and {_LONGEST_GRACE}, not {self.grace}.")
        _require_number("--replicas", self.replicas, 1, _MOST_REPLICAS)
        _require_number("--tokenizers", self.tokenizers, 0, _MOST_TEXT_PROCESSES)
        _require_number("--shims", self.shims, 0, _MOST_TEXT_PROCESSES)
        for flag, count in (("--tokenizers", self.tokenizers), ("--shims", self.shims)):
            if count > 1 and self.counts_limits_alone:
                raise ServeError(
                    f"{flag} {count} with --keys needs --limits-url: each of them would count the "
                    "limits of a key for itself."
                )


@dataclass(frozen=True, slots=True)
class LogPlace:
    """Folder of log files, and the size in bytes at which one is full (0 = no limit)."""

    folder: Path
    most_bytes: int


def require_port(name: str, port: int) -> None:
    """Raise ServeError for a number that no port has. name: how the message names it."""
    if not 1 <= port <= LAST_PORT:
        raise ServeError(f"{name} must be between 1 and {LAST_PORT}, not {port}.")


def _require_number(flag: str, number: int, least: int, most: int) -> None:
    if not least <= number <= most:
        raise ServeError(f"{flag} must be between {least} and {most}, not {number}.")
