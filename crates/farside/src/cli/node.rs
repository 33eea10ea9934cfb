//! `up` and `serve`: a memory node in this process.

use super::{Done, Failure, available_memory, duration, human_bytes, memory, quota, signals, token};
use farside::NewStore;
use farside::config::{File, Settings, default_socket, make_folder_of};
#[cfg(feature = "tls")]
use farside::config::{read_private, read_text};
use farside::parts::kinds;
use farside_fabrics::memory::{Found, Mapping, Pages};
use farside_node::catalog::Division;
use farside_node::host::{Admin, Host, Listen, Options};
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

/// Start a memory node with a store 'default'.
#[derive(clap::Args)]
pub(super) struct Up {
    /// Bytes of memory to lend; half of them for 'default', the rest for stores that are made later
    #[arg(long, value_name = "BYTES", default_value = "1GiB", value_parser = memory)]
    memory: u64,
    /// Where clients connect [default: where they look for it]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

/// Start a memory node.
#[derive(clap::Args)]
pub(super) struct Serve {
    /// Bytes of memory to lend: a multiple of 1MiB, 8MiB to 1TiB [default: what --memory-file has, else 1GiB]
    #[arg(long, value_name = "BYTES", value_parser = memory)]
    memory: Option<u64>,
    /// Where clients of this host connect [default: where they look for it]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Also serve clients at this url, by engines of this process: udp://127.0.0.1:7460, tcp://127.0.0.1:7460 or
    /// tls://127.0.0.1:7460 for any host (port 0: a free one), ring:PATH for this one. May be given several times
    #[arg(long, value_name = "URL", value_parser = listen)]
    listen: Vec<At>,
    /// What --listen tls:// shows to clients: a certificate in PEM, with those who signed it if there are any ('farside
    /// tls new' makes one)
    #[arg(long, value_name = "PATH", requires = "listen", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The certificate's private key, in PEM, which nobody else may read
    #[arg(long, value_name = "PATH", requires = "listen", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Who may do what by --listen: a file of tokens, which nobody else may read ('farside token new' makes entries for
    /// it). Required where other machines can reach an engine. SIGHUP has it read anew. Nobody is served by shm then
    #[arg(long, value_name = "PATH", requires = "listen")]
    tokens: Option<PathBuf>,
    /// Serve shm although there are --tokens: whoever runs programs as this user may then do everything, without one
    #[arg(long, requires = "tokens")]
    shm_trusts_all: bool,
    /// Leave packets of --listen udp:// in the clear, which --tokens seal: anyone who can see them can then read and
    /// forge them. Clients need the flag too. For a rack where all is trusted
    #[arg(long, requires = "listen")]
    insecure_udp: bool,
    /// Engines at each --listen, each a thread
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    engines: u32,
    /// Which pages back the memory: huge ones make random reads faster
    #[arg(long, value_enum, default_value_t = PagesArg::Auto)]
    pages: PagesArg,
    /// Show the node by HTTP: /health, /stores and /metrics [default address: 127.0.0.1:7400; port 0: a free one]
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    #[arg(num_args = 0..=1, default_missing_value = "127.0.0.1:7400")]
    admin: Option<SocketAddr>,
    /// A file with the token that HTTP clients must send; required unless --admin is of this machine alone
    #[arg(long, value_name = "PATH", requires = "admin")]
    admin_token_file: Option<PathBuf>,
    /// Keep the memory in this file: it survives the death of the node's process, though not of the machine. If the
    /// file holds a node's memory, its stores are served again
    #[arg(long, value_name = "PATH", conflicts_with = "pages")]
    memory_file: Option<PathBuf>,
    /// Kill clients of the node that served --memory-file before, if any are alive
    #[arg(long, requires = "memory_file")]
    evict: bool,
    /// Kill a client that was stopped for so long in the middle of an operation, so that memory can come back: 500ms,
    /// 10s, 2m or 1h; a number alone is seconds
    #[arg(long, value_name = "TIME", value_parser = duration)]
    evict_stopped_after: Option<Duration>,
    /// Make this store at once; may be given once
    #[arg(long, value_name = "NAME")]
    store: Option<String>,
    /// Bytes for the table and the items of --store together: a multiple of 1MiB [default: all there are]
    #[arg(long, value_name = "BYTES", value_parser = quota, requires = "store")]
    quota: Option<u64>,
    /// Items that the table of --store is to have room for
    #[arg(long, value_name = "N", requires = "store", value_parser = clap::value_parser!(u64).range(1..))]
    items: Option<u64>,
    /// Give each key of 8 bytes a slot of its own in --store (the paper's collision-free layout)
    #[arg(long, requires = "store")]
    collision_free: bool,
    /// Stop when the process that started this one ends
    #[arg(long)]
    die_with_parent: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum PagesArg {
    /// 2 MiB: reserved ones if there are enough, else such as the system can make while memory is filled (Linux 6.1 or
    /// later); else 4 KiB
    Auto,
    /// 4 KiB
    Small,
    /// 2 MiB, all of them reserved, or an error that says how to reserve them
    Huge,
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
        let serve = Serve {
            memory: Some(self.memory),
            socket: self.socket,
            listen: Vec::new(),
            tls_cert: None,
            tls_key: None,
            tokens: None,
            shm_trusts_all: false,
            insecure_udp: false,
            engines: 1,
            pages: PagesArg::Auto,
            admin: None,
            admin_token_file: None,
            memory_file: None,
            evict: false,
            evict_stopped_after: None,
            store: Some("default".into()),
            // The rest is for what else a newcomer tries: another store, a benchmark.
            quota: Some((self.memory / 2) >> 20 << 20).filter(|&quota| quota > 0),
            items: None,
            collision_free: false,
            die_with_parent: false,
        };
        let hints = hints(&serve.socket.clone().unwrap_or_else(default_socket))?;
        serve.serve(&hints)
    }
}

/// What a newcomer may try next: it works as it stands, in any shell, in any folder, and whatever else is set.
fn hints(socket: &Path) -> Result<String, Failure> {
    let socket = std::path::absolute(socket)?;
    let url = format!("shm:{}", socket.display());
    let called = std::env::args_os().next().unwrap_or_else(|| "farside".into());
    // A name without a folder was found by PATH, and will be again.
    let program = match called.as_bytes().contains(&b'/') {
        true => std::path::absolute(&called)?.display().to_string(),
        false => called.to_string_lossy().into_owned(),
    };
    // What is set wrongly is told by whichever command needs it; with both flags it needs nothing else.
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

/// As a shell reads it as one word.
pub(super) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_@%+=:,./-".contains(c);
    if word.chars().all(plain) { word.into() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

impl Serve {
    pub(super) fn run(self) -> Done {
        self.serve("")
    }

    /// Where shm is served, if it is: its clients have all of the memory, whatever tokens say.
    fn socket(&self) -> Result<Option<PathBuf>, Failure> {
        if self.tokens.is_some() && !self.shm_trusts_all {
            return match &self.socket {
                None => Ok(None),
                Some(_) => Err(Failure::Told(
                    "--socket serves shm, whose clients may do everything, and --tokens say who may do what: leave \
                     --socket out, or give --shm-trusts-all if everyone who runs programs as this user may"
                        .into(),
                )),
            };
        }
        let socket = self.socket.clone().unwrap_or_else(default_socket);
        if let Some(path) = socket.as_os_str().as_bytes().strip_prefix(b"shm:") {
            return Err(Failure::Told(format!(
                "--socket {} is a url, and takes a path: leave out shm:, as in --socket {}",
                socket.display(),
                path.escape_ascii()
            )));
        }
        make_folder_of(&socket).map_err(Failure::Told)?;
        Ok(Some(socket))
    }

    /// Where engines are to serve, and what they show there.
    fn listen(&self) -> Result<Vec<Listen>, Failure> {
        if self.engines > 1 && self.listen.is_empty() {
            return Err(Failure::Told(
                "--engines serve at --listen alone, and none is given: give one, or leave --engines out"
                    .into(),
            ));
        }
        let has_udp = self.listen.iter().any(|at| matches!(at, At::Plain(Listen::Udp(_))));
        if self.insecure_udp && (self.tokens.is_none() || !has_udp) {
            return Err(Failure::Told(
                "--insecure-udp leaves packets in the clear that --tokens would seal, of --listen udp:// alone, and \
                 one of both is not given: give it, or leave --insecure-udp out"
                    .into(),
            ));
        }
        let is_shown = self.listen.iter().any(|at| matches!(at, At::Tls(_)));
        let by_tls = match (&self.tls_cert, &self.tls_key) {
            (Some(certificate), Some(key)) if is_shown => Some(showing(certificate, key)?),
            (None, None) if is_shown => {
                return Err(Failure::Told(
                    "--listen tls:// takes a certificate to show: give --tls-cert and --tls-key ('farside tls new' \
                     makes both)"
                        .into(),
                ));
            }
            (Some(_), _) => {
                return Err(Failure::Told(
                    "--tls-cert is shown by tls alone, and no --listen tls:// is given: give one, or leave it out"
                        .into(),
                ));
            }
            _ => None,
        };
        let listen = self.listen.iter().map(|at| match (at, &by_tls) {
            (At::Tls(address), Some(by_tls)) => by_tls(*address),
            (At::Tls(_), None) => unreachable!("there is a certificate where one is shown"),
            (At::Plain(listen), _) => listen.clone(),
        });
        Ok(listen.collect())
    }

    fn memory(&self) -> u64 {
        const MEMORY: u64 = 1 << 30;
        // A file that cannot be looked at is told of when it is opened.
        let file = self.memory_file.as_ref().and_then(|path| std::fs::metadata(path).ok());
        let found = file.map(|file| file.len()).filter(|&len| Geometry::of(len).is_some());
        self.memory.or(found).unwrap_or(MEMORY)
    }

    /// Serves until a signal comes; once it does, says where, and what to try next.
    fn serve(self, hints: &str) -> Done {
        // Before anything that takes time, so that no signal is missed.
        let mut heard = signals::ending();
        if self.tokens.is_some() {
            heard.push(RELOAD);
        }
        let mut signals = signal_hook::iterator::Signals::new(heard)?;
        end_on_panic();
        if self.die_with_parent {
            die_with_parent()?;
        }
        let tokens = self.tokens.as_deref().map(token::read).transpose().map_err(Failure::Told)?;
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
                "this machine has {} of memory available, less than is to be lent: once that is spent, the system \
                 ends processes; serve less --memory, or none that fills it",
                human_bytes(available)
            );
        }
        let page_size = memory.page_size().0;
        let options = Options {
            socket: socket.clone(),
            listen,
            engines: self.engines as usize,
            tokens,
            insecure_udp: self.insecure_udp,
            evict_stopped_after: self.evict_stopped_after,
            admin: self.admin()?,
            take_over: found == Found::Memory,
            evict: self.evict,
        };
        let host = Host::start(memory, kinds(), options)?;
        if let Some(name) = &self.store {
            self.make_store(&host, name, found)?;
        }
        let shm = socket.map_or_else(String::new, |socket| format!(" at shm:{}", socket.display()));
        tell!(
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
        // Whoever has read that the node serves may leave.
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

    fn admin(&self) -> Result<Option<Admin>, Failure> {
        let Some(listen) = self.admin else { return Ok(None) };
        let token = self.admin_token_file.as_ref().map(|path| {
            let bytes = std::fs::read(path).map_err(|error| {
                Failure::Told(format!(
                    "could not read the token in {}: {error}; name a file that you may read",
                    path.display()
                ))
            })?;
            match bytes.trim_ascii() {
                b"" => Err(Failure::Told(format!("{} holds no token: put one into it", path.display()))),
                // What no header can carry, no client could send.
                token if !token.iter().all(u8::is_ascii_graphic) => Err(Failure::Told(format!(
                    "{} holds no token: put one line of visible ASCII characters without spaces into it, such as \
                     'openssl rand -hex 16' writes",
                    path.display()
                ))),
                token => Ok(String::from_utf8_lossy(token).into_owned()),
            }
        });
        Ok(Some(Admin { listen, token: token.transpose()? }))
    }

    /// The store of `--store` has its `--quota`, or all memory but what its reserve takes.
    fn make_store(&self, host: &Host, name: &str, found: Found) -> Done {
        const STORE_WAIT: Duration = Duration::from_secs(60);
        let open = Ask::OpenStore { name: name.to_owned() };
        // If it cannot be opened it is made, and whatever is in the way of that is told.
        if found == Found::Memory
            && let Ok(Answer::Store(store)) = host.ask(open, STORE_WAIT)
        {
            self.compare(&store); // It came with the memory.
            return Ok(());
        }
        let Ok(Answer::NodeInfo(info)) = host.ask(Ask::NodeInfo, STORE_WAIT) else {
            return Err(Failure::Told("the node that was just started has no answer".into()));
        };
        let mut new = NewStore::prism_kv(name, self.quota.map_or_else(|| all_of(&info), Ok)?);
        (new.items, new.collision_free) = (self.items, self.collision_free);
        host.ask(new.ask(), STORE_WAIT)?;
        Ok(())
    }

    /// Warns where a store that came with the memory is not what was asked for.
    fn compare(&self, store: &Store) {
        // A table of another kind is not what was asked for either, and has no slots that are known here.
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
                "the memory file has a store '{}' already, and it stays as it is: a quota of {}, a table for {} \
                 items{}; to have another, drop it or choose another name",
                store.name,
                human_bytes(store.quota),
                shape.items,
                if is_collision_free { ", collision-free" } else { "" }
            );
        }
    }
}

/// Has a node with tokens read them anew.
const RELOAD: c_int = signal_hook::consts::SIGHUP;

/// Tokens that cannot be read leave those that were read before in force.
fn reload(host: &Host, path: &Path) {
    match token::read(path) {
        Ok(tokens) => {
            tracing::info!("read {} anew: it has {} tokens", path.display(), tokens.token.len());
            host.set_tokens(tokens);
        }
        Err(reason) => tracing::error!("{reason}; the tokens that were read before stay in force"),
    }
}

/// The quota that leaves nothing over, in whole segments.
fn all_of(info: &NodeInfo) -> Result<u64, Failure> {
    const MIN: u64 = 2; // One segment for a table, one for buffers.
    let unassigned = info.unassigned_bytes / SEGMENT_SIZE;
    match unassigned.saturating_sub(Division::reserve_of(unassigned)) {
        ..MIN => Err(Failure::Told(format!(
            "the node has {} MiB that no store has, too little for --store: drop a store, or serve more --memory",
            info.unassigned_bytes >> 20
        ))),
        all => Ok(all * SEGMENT_SIZE),
    }
}

fn engines(count: u32) -> String {
    if count == 1 { "an engine serves".into() } else { format!("{count} engines serve") }
}

/// Where engines are to serve, before it is known what they show.
#[derive(Clone, Debug)]
enum At {
    Plain(Listen),
    Tls(SocketAddr),
}

/// How to serve by TLS and show what these files have.
#[cfg(feature = "tls")]
fn showing(certificate: &Path, key: &Path) -> Result<impl Fn(SocketAddr) -> Listen, Failure> {
    use farside_fabrics::tcp::tls::{Identity, IdentityError};
    let shown = read_text(certificate, "certificates").map_err(Failure::Told)?;
    let secret = read_private(key).map_err(Failure::Told)?;
    let identity = Identity::from_pem(shown.as_bytes(), secret.as_bytes());
    let identity = identity.map_err(|error| {
        Failure::Told(match error {
            IdentityError::Certificate(reason) => format!("{} {reason}", certificate.display()),
            IdentityError::Key(reason) => format!("{} {reason}", key.display()),
        })
    })?;
    Ok(move |address| Listen::Tls(address, identity.clone()))
}

#[cfg(not(feature = "tls"))]
fn showing(_certificate: &Path, _key: &Path) -> Result<impl Fn(SocketAddr) -> Listen, Failure> {
    Err::<fn(SocketAddr) -> Listen, _>(Failure::Told(farside::parts::NO_TLS.into()))
}

/// For clap: where engines are to serve.
fn listen(url: &str) -> Result<At, String> {
    let wrong = || {
        format!(
            "'{url}' is no address that can be served: give an address and a port, like tcp://127.0.0.1:7460, or \
             ring:PATH; shm is served at --socket"
        )
    };
    if let Some(path) = url.strip_prefix("ring:").filter(|path| !path.is_empty()) {
        return Ok(At::Plain(Listen::Ring(path.into())));
    }
    match url.split_once("://") {
        Some(("udp", address)) => address.parse().map(Listen::Udp).map(At::Plain).map_err(|_| wrong()),
        Some(("tcp", address)) => address.parse().map(Listen::Tcp).map(At::Plain).map_err(|_| wrong()),
        Some(("tls", address)) => address.parse().map(At::Tls).map_err(|_| wrong()),
        _ => Err(wrong()),
    }
}

/// For clap: where to listen.
fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| format!("'{text}' is no address and port: write it like 127.0.0.1:7400"))
}

/// A node one of whose threads has ended must not seem to live: clients would wait for it.
fn end_on_panic() {
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tell(panic);
        std::process::exit(101);
    }));
}

/// Asks the system to end this process with its parent, and ends it now if that has happened already.
pub(super) fn die_with_parent() -> Done {
    let parent = rustix::process::getppid();
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
    if rustix::process::getppid() != parent {
        return Err(Failure::Told("the process that started this one has ended".into()));
    }
    Ok(())
}
