//! `up` and `serve`: a memory node in this process, or several in processes of their own.

mod healer;
mod processes;

use super::{Done, Failure, available_memory, duration, human_bytes, memory, quota, signals, token};
use farside::NewStore;
use farside::config::{File, Settings, default_socket, make_folder_of};
#[cfg(feature = "tls")]
use farside::config::{read_private, read_text};
use farside::parts::kinds;
use farside_fabrics::memory::{Found, Mapping, Pages};
use farside_node::catalog::Division;
use farside_node::host::{Admin, EngineMode, Host, Listen, LogFolder, Options};
use farside_node::log::{LogOptions, SyncPolicy};
use farside_remote::arena::{Geometry, SEGMENT_SIZE};
use farside_remote::control::{Answer, Ask, NodeInfo, Store};
use farside_systems::registry::{named, shape_of};
use farside_systems::system::Sizing;
use std::ffi::c_int;
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Start a memory node, or several, with a store 'default'.
#[derive(clap::Args)]
pub(super) struct Up {
    /// Number of nodes, each a process; several hold one store 'default', and their pool is printed for --pool
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    nodes: u32,
    /// Bytes of memory that each node lends; half are for the store 'default', the rest for stores that are created
    /// later
    #[arg(long, value_name = "BYTES", default_value = "1GiB", value_parser = memory)]
    memory: u64,
    /// Socket at which clients connect [default: the one that clients use by default]; with several nodes, -0, -1 and
    /// so on are added to the file's name
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

/// Start a memory node.
#[derive(clap::Args)]
pub(super) struct Serve {
    /// Bytes of memory to lend: a multiple of 1MiB, from 8MiB to 1TiB [default: the size of --memory-file, else 1GiB]
    #[arg(long, value_name = "BYTES", value_parser = memory)]
    memory: Option<u64>,
    /// Socket at which clients of this host connect [default: the one that clients use by default]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Also serve clients at this URL, with engines of this process: udp://127.0.0.1:7460, tcp://127.0.0.1:7460 or
    /// tls://127.0.0.1:7460 for clients of any host (port 0: a free port), verbs://DEVICE[:PORT] for clients of any
    /// host by RDMA, ring:PATH for clients of this host. May be given several times
    #[arg(long, value_name = "URL", value_parser = listen)]
    listen: Vec<At>,
    /// PEM file of the certificate for --listen tls://, followed by the certificates of its issuers, if any ('farside
    /// tls new' creates one)
    #[arg(long, value_name = "PATH", requires = "listen", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// PEM file of the certificate's private key, which no other user may read
    #[arg(long, value_name = "PATH", requires = "listen", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// File of the tokens that --listen accepts and their rights; no other user may read it ('farside token new' prints
    /// entries for it). Required if other machines can reach an engine. SIGHUP reloads it. Turns off shm
    #[arg(long, value_name = "PATH", requires = "listen")]
    tokens: Option<PathBuf>,
    /// Serve shm in spite of --tokens: every program of this user may then do everything, without a token
    #[arg(long, requires = "tokens")]
    shm_trusts_all: bool,
    /// Leave packets of --listen udp:// in the clear, which --tokens would seal: anyone who sees the packets can read
    /// and forge them. Clients need the flag too. For racks where every host is trusted
    #[arg(long, requires = "listen")]
    insecure_udp: bool,
    /// Let the NIC of --listen verbs:// execute the atomics of all stores, for systems that need classic verbs only.
    /// Engines then execute none, and shm clients open no store
    #[cfg(feature = "verbs")]
    #[arg(long, requires = "listen")]
    nic_atomics: bool,
    /// Number of engines at each --listen; each is a thread
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    engines: u32,
    /// How engines wait for requests
    #[arg(long, value_enum, default_value_t = EngineModeArg::Poll, requires = "listen")]
    engine_mode: EngineModeArg,
    /// Size of the pages that back the memory: huge pages make random reads faster
    #[arg(long, value_enum, default_value_t = PagesArg::Auto)]
    pages: PagesArg,
    /// Serve /health, /stores and /metrics over HTTP [default address: 127.0.0.1:7400; port 0: a free port]
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    #[arg(num_args = 0..=1, default_missing_value = "127.0.0.1:7400")]
    admin: Option<SocketAddr>,
    /// File with the token that HTTP clients must send; required unless the address of --admin is a loopback address
    #[arg(long, value_name = "PATH", requires = "admin")]
    admin_token_file: Option<PathBuf>,
    /// Keep the memory in this file: it survives the end of the node's process, but not of the machine. If the file
    /// holds the memory of an earlier node, its stores are served again
    #[arg(long, value_name = "PATH", conflicts_with = "pages")]
    memory_file: Option<PathBuf>,
    /// Log the puts and deletes of stores of kinds that have logs, in this folder. If it has logs of an earlier node,
    /// their stores are served again, with fresh memory too
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// When a put or delete of --log-dir is answered
    #[arg(long, value_enum, default_value_t = LogSync::Each, requires = "log_dir")]
    log_sync: LogSync,
    /// Kill the clients of the earlier node of --memory-file that are still alive
    #[arg(long, requires = "memory_file")]
    evict: bool,
    /// Kill a client that has been stopped for this long in the middle of an operation, so that its memory can be
    /// reused: 500ms, 10s, 2m or 1h; a number alone is seconds
    #[arg(long, value_name = "TIME", value_parser = duration)]
    evict_stopped_after: Option<Duration>,
    /// Create this store at the start; may be given once
    #[arg(long, value_name = "NAME")]
    store: Option<String>,
    /// Bytes for the table and the items of --store together: a multiple of 1MiB [default: all of the memory]
    #[arg(long, value_name = "BYTES", value_parser = quota, requires = "store")]
    quota: Option<u64>,
    /// Number of items for which the table of --store is sized
    #[arg(long, value_name = "N", requires = "store", value_parser = clap::value_parser!(u64).range(1..))]
    items: Option<u64>,
    /// Give each 8-byte key of --store its own slot (the paper's collision-free layout)
    #[arg(long, requires = "store")]
    collision_free: bool,
    /// Heal the stores of --pool at this interval, as 'farside heal --watch' does
    #[arg(long, value_name = "INTERVAL", value_parser = super::heal::interval)]
    #[arg(num_args = 0..=1, default_missing_value = "10s")]
    heal: Option<Duration>,
    /// Nodes whose stores --heal heals, as --pool of other commands names them, this one among them [default:
    /// FARSIDE_POOL or the settings file]
    #[arg(long, value_name = "URL", requires = "heal")]
    pool: Option<String>,
    /// Stop when the process that started this one ends
    #[arg(long)]
    die_with_parent: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum PagesArg {
    /// 2 MiB if enough huge pages are reserved, or if the system can form them as memory is filled (Linux 6.1 or
    /// later); else 4 KiB
    Auto,
    /// 4 KiB
    Small,
    /// 2 MiB, all of them reserved; fails with instructions if there are too few
    Huge,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum EngineModeArg {
    /// Poll for 60 us after a request, then sleep: the shortest latencies
    Poll,
    /// Sleep until something arrives: the least CPU time at a low load
    Event,
}

impl From<EngineModeArg> for EngineMode {
    fn from(mode: EngineModeArg) -> EngineMode {
        match mode {
            EngineModeArg::Poll => EngineMode::Poll,
            EngineModeArg::Event => EngineMode::Event,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum LogSync {
    /// At once; the system writes the log to the disk when it likes, so a crash of the machine may lose any of it
    Never,
    /// At once; the log is synced every second, so a crash of the machine loses about a second
    Interval,
    /// When it is on the disk; what is answered is never lost
    Each,
}

impl From<LogSync> for SyncPolicy {
    fn from(sync: LogSync) -> SyncPolicy {
        match sync {
            LogSync::Never => SyncPolicy::Never,
            LogSync::Interval => SyncPolicy::Interval,
            LogSync::Each => SyncPolicy::Each,
        }
    }
}

impl From<PagesArg> for Pages {
    fn from(pages: PagesArg) -> Pages {
        match pages {
            PagesArg::Auto => Pages::Auto,
            PagesArg::Small => Pages::Small,
            PagesArg::Huge => Pages::Huge,
        }
    }
}

impl Up {
    pub(super) fn run(self) -> Done {
        // The rest is for other stores, such as that of a benchmark.
        let quota = Some((self.memory / 2) >> 20 << 20).filter(|&quota| quota > 0);
        if self.nodes > 1 {
            let socket = self.socket.unwrap_or_else(default_socket);
            let quota = quota.unwrap_or(0) * u64::from(self.nodes);
            let store = NewStore::prism_kv("default", quota);
            return processes::run(
                self.nodes,
                &socket,
                &["--memory".into(), self.memory.to_string()],
                &store,
            );
        }
        let serve = Serve {
            #[cfg(feature = "verbs")]
            nic_atomics: false,
            memory: Some(self.memory),
            socket: self.socket,
            listen: Vec::new(),
            tls_cert: None,
            tls_key: None,
            tokens: None,
            shm_trusts_all: false,
            insecure_udp: false,
            engines: 1,
            engine_mode: EngineModeArg::Poll,
            pages: PagesArg::Auto,
            admin: None,
            admin_token_file: None,
            memory_file: None,
            log_dir: None,
            log_sync: LogSync::Each,
            evict: false,
            evict_stopped_after: None,
            store: Some("default".into()),
            quota,
            items: None,
            collision_free: false,
            heal: None,
            pool: None,
            die_with_parent: false,
        };
        let hints = hints(&serve.socket.clone().unwrap_or_else(default_socket))?;
        serve.serve(&hints)
    }
}

/// Returns commands that the user may try next.
///
/// Invariant: they work unchanged in any shell and any folder, whatever other settings say.
fn hints(socket: &Path) -> Result<String, Failure> {
    let socket = std::path::absolute(socket)?;
    let url = format!("shm:{}", socket.display());
    let program = program()?;
    // Invalid settings are not reported here: with both flags, the commands need no settings.
    let (leads_here, is_default) = Settings::resolve(File::default()).map_or((false, false), |settings| {
        let pool = settings.pool.value.strip_prefix("shm:").unwrap_or(&settings.pool.value).to_owned();
        (Path::new(&pool) == socket, settings.store.value == "default")
    });
    let (program, url) = (quoted(&program), quoted(&url));
    let pool = if leads_here { String::new() } else { format!(" --pool {url}") };
    let store = if is_default { "" } else { " --store default" };
    Ok(format!(
        "Try in another terminal:\n  \
         {program} kv put greeting hello{pool}{store}\n  \
         {program} kv get greeting{pool}{store}\n  \
         {program} bench ycsb --workload c --records 100000 --pool {url}\n\
         Press Ctrl-C to stop; the memory is gone then.\n"
    ))
}

/// Returns the path or the name by which a shell starts this program again.
fn program() -> std::io::Result<String> {
    let called = std::env::args_os().next().unwrap_or_else(|| "farside".into());
    // A name without a slash was found through PATH, and will be found again.
    match called.as_bytes().contains(&b'/') {
        true => Ok(std::path::absolute(&called)?.display().to_string()),
        false => Ok(called.to_string_lossy().into_owned()),
    }
}

/// Quotes text so that a shell reads it as one word.
pub(super) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_@%+=:,./-".contains(c);
    if word.chars().all(plain) { word.into() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

impl Serve {
    pub(super) fn run(self) -> Done {
        self.serve("")
    }

    /// Path of the shm socket, or `None` if shm is not served.
    ///
    /// Clients of shm can access all of the node's memory, whatever their tokens grant. `--tokens` therefore turns shm
    /// off.
    fn socket(&self) -> Result<Option<PathBuf>, Failure> {
        if self.tokens.is_some() && !self.shm_trusts_all {
            return match &self.socket {
                None => Ok(None),
                Some(_) => Err(Failure::Error(
                    "--socket serves shm, whose clients may do everything, so it contradicts --tokens: leave --socket \
                     out, or give --shm-trusts-all if you trust all programs of this user"
                        .into(),
                )),
            };
        }
        let socket = self.socket.clone().unwrap_or_else(default_socket);
        if let Some(path) = socket.as_os_str().as_bytes().strip_prefix(b"shm:") {
            return Err(Failure::Error(format!(
                "--socket takes a path, and {} is a URL: leave out shm:, as in --socket {}",
                socket.display(),
                path.escape_ascii()
            )));
        }
        make_folder_of(&socket).map_err(Failure::Error)?;
        Ok(Some(socket))
    }

    /// Addresses at which the engines serve, with the certificates to present there.
    ///
    /// # Errors
    /// A flag lacks another flag that it needs, or a certificate cannot be used.
    fn listen(&self) -> Result<Vec<Listen>, Failure> {
        if self.engines > 1 && self.listen.is_empty() {
            return Err(Failure::Error(
                "--engines has no effect without --listen: give --listen, or leave --engines out".into(),
            ));
        }
        let has_udp = self.listen.iter().any(|at| matches!(at, At::Plain(Listen::Udp(_))));
        if self.insecure_udp && (self.tokens.is_none() || !has_udp) {
            return Err(Failure::Error(
                "--insecure-udp has no effect without --tokens and --listen udp://: give both, or leave \
                 --insecure-udp out"
                    .into(),
            ));
        }
        let has_tls = self.listen.iter().any(|at| matches!(at, At::Tls(_)));
        let by_tls = match (&self.tls_cert, &self.tls_key) {
            (Some(certificate), Some(key)) if has_tls => Some(with_certificate(certificate, key)?),
            (None, None) if has_tls => {
                return Err(Failure::Error(
                    "--listen tls:// requires a certificate: give --tls-cert and --tls-key ('farside tls new' \
                     creates both)"
                        .into(),
                ));
            }
            (Some(_), _) => {
                return Err(Failure::Error(
                    "--tls-cert has no effect, as no --listen tls:// is given: give one, or leave --tls-cert out"
                        .into(),
                ));
            }
            _ => None,
        };
        let listen = self.listen.iter().map(|at| match (at, &by_tls) {
            (At::Tls(address), Some(by_tls)) => by_tls(*address),
            (At::Tls(_), None) => unreachable!("a tls address has a certificate, as checked above"),
            (At::Plain(listen), _) => listen.clone(),
        });
        Ok(listen.collect())
    }

    /// Bytes of memory to lend: `--memory`, else the size of `--memory-file`, else 1 GiB.
    fn memory(&self) -> u64 {
        const MEMORY: u64 = 1 << 30;
        // An error is ignored here, as opening the file will report it.
        let file = self.memory_file.as_ref().and_then(|path| std::fs::metadata(path).ok());
        let found = file.map(|file| file.len()).filter(|&len| Geometry::of(len).is_some());
        self.memory.or(found).unwrap_or(MEMORY)
    }

    /// Starts the node, prints its addresses and `hints`, and serves until a signal arrives.
    fn serve(self, hints: &str) -> Done {
        // The first step, so that no signal is missed.
        let mut handled = signals::ending();
        if self.tokens.is_some() {
            handled.push(RELOAD);
        }
        let mut signals = signal_hook::iterator::Signals::new(handled)?;
        end_on_panic();
        if self.die_with_parent {
            die_with_parent()?;
        }
        let tokens = self.tokens.as_deref().map(token::read).transpose().map_err(Failure::Error)?;
        let listen = self.listen()?;
        let socket = self.socket()?;
        let bytes = self.memory();
        let (memory, found) = match &self.memory_file {
            Some(path) => Mapping::open(path, bytes)?,
            None => (Mapping::create(bytes, self.pages.into())?, Found::Nothing),
        };
        if let Some(available) = available_memory().filter(|&available| available < bytes)
            && self.memory_file.is_none()
        {
            tracing::warn!(
                "this machine has {} of memory available, less than the node lends: when it runs out, the system \
                 kills processes; serve less --memory",
                human_bytes(available)
            );
        }
        let page_size = memory.page_size().0;
        let options = Options {
            socket: socket.clone(),
            listen,
            engines: self.engines as usize,
            engine_mode: self.engine_mode.into(),
            tokens,
            #[cfg(feature = "verbs")]
            nic_atomics: self.nic_atomics,
            #[cfg(not(feature = "verbs"))]
            nic_atomics: false,
            insecure_udp: self.insecure_udp,
            evict_stopped_after: self.evict_stopped_after,
            admin: self.admin()?,
            log: self.log_dir.clone().map(|path| {
                let options = LogOptions { sync: self.log_sync.into(), ..LogOptions::default() };
                LogFolder { path, options }
            }),
            take_over: found == Found::Memory,
            evict: self.evict,
        };
        let host = Host::start(memory, kinds(), options)?;
        if let Some(name) = &self.store {
            self.make_store(&host, name, found)?;
        }
        if let Some(every) = self.heal {
            healer::start(self.pool.clone(), every)?;
        }
        let shm = socket.map_or_else(String::new, |socket| format!(" at shm:{}", socket.display()));
        print_line!(
            "farside: node pid {} serves {} of memory ({} pages){shm}",
            std::process::id(),
            human_bytes(bytes),
            human_bytes(page_size)
        );
        let mut more = String::new();
        for at in host.listening() {
            more += &format!("farside: {} at {at}\n", engines(self.engines));
        }
        if let Some(at) = host.admin_at() {
            more += &format!("farside: watch it at http://{at}/{{health,stores,metrics}}\n");
        }
        more += hints;
        // A script may close the pipe after the first line, which says that the node serves.
        let _unread = std::io::stdout().write_all(more.as_bytes());
        let mut signals = signals.forever();
        let signal = loop {
            match (signals.next(), &self.tokens) {
                (Some(RELOAD), Some(path)) => reload(&host, path),
                (signal, _) => break signal,
            }
        };
        let signal = signal.and_then(signal_hook::low_level::signal_name);
        tracing::info!("stopping on {}", signal.unwrap_or("a signal"));
        host.stop();
        Ok(())
    }

    /// Address and token of the HTTP endpoint, if there is one.
    fn admin(&self) -> Result<Option<Admin>, Failure> {
        let Some(listen) = self.admin else { return Ok(None) };
        let token = self.admin_token_file.as_ref().map(|path| {
            let bytes = std::fs::read(path).map_err(|error| {
                Failure::Error(format!(
                    "could not read the token in {}: {error}; name a file that you may read",
                    path.display()
                ))
            })?;
            match bytes.trim_ascii() {
                b"" => Err(Failure::Error(format!("{} holds no token: put one into it", path.display()))),
                // An HTTP header can carry no other characters.
                token if !token.iter().all(u8::is_ascii_graphic) => Err(Failure::Error(format!(
                    "{} holds no token: put one line of visible ASCII characters without spaces into it, such as \
                     'openssl rand -hex 16' writes",
                    path.display()
                ))),
                token => Ok(String::from_utf8_lossy(token).into_owned()),
            }
        });
        Ok(Some(Admin { listen, token: token.transpose()? }))
    }

    /// Creates the store of `--store`, unless it came with the memory file or with a log.
    ///
    /// Its quota is `--quota`, or all of the memory except its reserve.
    fn make_store(&self, host: &Host, name: &str, found: Found) -> Done {
        const STORE_WAIT: Duration = Duration::from_secs(60);
        let open = Ask::OpenStore { name: name.to_owned() };
        // If it cannot be opened, it is created below, and an error of that is reported.
        if (found == Found::Memory || self.log_dir.is_some())
            && let Ok(Answer::Store(store)) = host.ask(open, STORE_WAIT)
        {
            self.compare(&store);
            return Ok(());
        }
        let Ok(Answer::NodeInfo(info)) = host.ask(Ask::NodeInfo, STORE_WAIT) else {
            return Err(Failure::Error("the new node did not respond: start it again".into()));
        };
        let mut new = NewStore::prism_kv(name, self.quota.map_or_else(|| all_of(&info), Ok)?);
        (new.items, new.collision_free) = (self.items, self.collision_free);
        host.ask(new.ask(), STORE_WAIT)?;
        Ok(())
    }

    /// Warns if a store that came with the memory file or with a log differs from the one that the flags describe.
    fn compare(&self, store: &Store) {
        // A table of another kind counts as different: its number of slots is unknown here.
        let shape = shape_of(store).unwrap_or_default();
        let is_collision_free = shape.is_collision_free;
        let slots = named(&store.kind).and_then(|system| {
            (system.footprint)(&Sizing { items: self.items, ..Sizing::default() })
                .ok()
                .map(|asked| asked.slots)
        });
        let is_other = self.quota.is_some_and(|quota| quota != store.quota)
            || self.items.is_some() && slots != Some(shape.slots)
            || self.collision_free && !is_collision_free;
        if is_other {
            tracing::warn!(
                "the memory file or the log already has a store '{}', which is left unchanged: a quota of {}, a table \
                 for {} items{}; to get the one requested, drop it or choose another name",
                store.name,
                human_bytes(store.quota),
                shape.items,
                if is_collision_free { ", collision-free" } else { "" }
            );
        }
    }
}

/// Signal on which a node reloads its tokens.
const RELOAD: c_int = signal_hook::consts::SIGHUP;

/// Reloads the tokens. If the file cannot be read, the node keeps the tokens that it has.
fn reload(host: &Host, path: &Path) {
    match token::read(path) {
        Ok(tokens) => {
            tracing::info!("reloaded {}: it has {} tokens", path.display(), tokens.token.len());
            host.set_tokens(tokens);
        }
        Err(reason) => tracing::error!("{reason}; the tokens read before stay in force"),
    }
}

/// The largest possible quota: all unassigned memory except the reserve, in whole segments.
fn all_of(info: &NodeInfo) -> Result<u64, Failure> {
    const MIN: u64 = 2; // One segment for a table, one for buffers.
    let unassigned = info.unassigned_bytes / SEGMENT_SIZE;
    match unassigned.saturating_sub(Division::reserve_of(unassigned)) {
        ..MIN => Err(Failure::Error(format!(
            "the node has {} MiB of unassigned memory, too little for --store: drop a store, or serve more --memory",
            info.unassigned_bytes >> 20
        ))),
        all => Ok(all * SEGMENT_SIZE),
    }
}

fn engines(count: u32) -> String {
    if count == 1 { "an engine serves".into() } else { format!("{count} engines serve") }
}

/// An address of `--listen`. A TLS address gets its certificate later.
#[derive(Clone, Debug)]
enum At {
    Plain(Listen),
    Tls(SocketAddr),
}

/// Reads a certificate and its key. Returns a function that adds them to a TLS address.
#[cfg(feature = "tls")]
fn with_certificate(certificate: &Path, key: &Path) -> Result<impl Fn(SocketAddr) -> Listen, Failure> {
    use farside_fabrics::tcp::tls::{Identity, IdentityError};
    let shown = read_text(certificate, "certificates").map_err(Failure::Error)?;
    let secret = read_private(key).map_err(Failure::Error)?;
    let identity = Identity::from_pem(shown.as_bytes(), secret.as_bytes());
    let identity = identity.map_err(|error| {
        Failure::Error(match error {
            IdentityError::Certificate(reason) => format!("{} {reason}", certificate.display()),
            IdentityError::Key(reason) => format!("{} {reason}", key.display()),
        })
    })?;
    Ok(move |address| Listen::Tls(address, identity.clone()))
}

#[cfg(not(feature = "tls"))]
fn with_certificate(_certificate: &Path, _key: &Path) -> Result<impl Fn(SocketAddr) -> Listen, Failure> {
    Err::<fn(SocketAddr) -> Listen, _>(Failure::Error(farside::parts::NO_TLS.into()))
}

/// Parses, for clap, an address of `--listen`.
fn listen(url: &str) -> Result<At, String> {
    let wrong = || {
        format!(
            "'{url}' cannot be served: give an address and a port, like tcp://127.0.0.1:7460, or ring:PATH; shm is \
             served at --socket"
        )
    };
    if let Some(path) = url.strip_prefix("ring:").filter(|path| !path.is_empty()) {
        return Ok(At::Plain(Listen::Ring(path.into())));
    }
    match url.split_once("://") {
        Some(("udp", address)) => address.parse().map(Listen::Udp).map(At::Plain).map_err(|_| wrong()),
        Some(("tcp", address)) => address.parse().map(Listen::Tcp).map(At::Plain).map_err(|_| wrong()),
        Some(("tls", address)) => address.parse().map(At::Tls).map_err(|_| wrong()),
        Some(("verbs", address)) => by_verbs(url, address),
        _ => Err(wrong()),
    }
}

#[cfg(feature = "verbs")]
fn by_verbs(url: &str, device: &str) -> Result<At, String> {
    let at = farside_fabrics::verbs::VerbsAddress::parse(device);
    at.map(Listen::Verbs).map(At::Plain).map_err(|reason| {
        format!(
            "'{url}' cannot be served: {reason}: write it like verbs://mlx5_0:7460 or verbs://rxe0:7460?gid=1"
        )
    })
}

#[cfg(not(feature = "verbs"))]
fn by_verbs(_url: &str, _device: &str) -> Result<At, String> {
    Err(farside::parts::NO_VERBS.into())
}

/// Parses, for clap, the address of `--admin`.
fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| format!("'{text}' is not an address and a port: write it like 127.0.0.1:7400"))
}

/// Makes a panic of any thread end the process: a node that lost a thread would seem alive, and clients would wait.
fn end_on_panic() {
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tell(panic);
        std::process::exit(101);
    }));
}

/// Asks the system to end this process when its parent ends. Fails if the parent has ended already.
pub(super) fn die_with_parent() -> Done {
    let parent = rustix::process::getppid();
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
    if rustix::process::getppid() != parent {
        return Err(Failure::Error("the process that started this one has ended".into()));
    }
    Ok(())
}
