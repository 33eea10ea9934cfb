//! Where `perf` measures: a server of its own, a node that is started for it, or one that was there.
//!
//! Invariant: there is a store of plain memory that no other program was meant to use.

use crate::cli::bench::{FabricArg, Lent, NodeProcess};
use crate::cli::{Done, Failure, check_available, connect, signals, token};
use farside::config::{File, Settings};
use farside::parts::kinds;
use farside::{Error, NewStore, Pool};
use farside_fabrics::memory::{Mapping, Pages};
use farside_fabrics::session::endpoint::OpenError;
use farside_node::host::{BindError, Host, Listen, Options};
use farside_systems::raw;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// perftest's.
pub(super) const PORT: u16 = 18515;
/// The store of a server.
const STORE: &str = "perf";
/// Of a node that is there for this alone: it is taken as it is written to.
const MEMORY: u64 = 256 << 20;
const QUOTA: u64 = 192 << 20;
/// Of a store on a node that was there: twice what 64 tasks read and write.
const QUOTA_LENT: u64 = 16 << 20;
/// Where each request takes a buffer, which comes back a little later.
const QUOTA_OF_PUTS: u64 = 128 << 20;
const _: () = assert!(QUOTA_LENT / 2 >= (64 << 16) + (1 << 20));

/// What carries requests between server and client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Device {
    Tcp,
    Udp,
}

impl Device {
    fn name(self) -> &'static str {
        match self {
            Device::Tcp => "tcp",
            Device::Udp => "udp",
        }
    }
}

/// For clap: what carries requests.
pub(super) fn device(text: &str) -> Result<Device, String> {
    match text {
        "tcp" => Ok(Device::Tcp),
        "udp" => Ok(Device::Udp),
        _ => Err(format!(
            "'{text}' is nothing that carries requests to a perf server, and RDMA devices are not used: give tcp or \
             udp; on one host, --fabric has more"
        )),
    }
}

/// Where to measure.
pub(super) struct Place {
    pub(super) pool: Pool,
    pub(super) store: String,
    /// What is told of the node.
    pub(super) node: String,
    /// The store to drop, on a node that goes on without this.
    _lent: Option<Lent>,
    /// The node that was started for this.
    _node: Option<NodeProcess>,
}

impl Place {
    /// At a server of perf's own.
    ///
    /// # Errors
    /// The host is none, or nobody serves there; takes a second at most, besides what the host's name takes.
    pub(super) fn at_host(
        host: &str,
        port: u16,
        device: Device,
        test: &str,
        flags: File,
        insecure_udp: bool,
    ) -> Result<Place, Failure> {
        let url = format!("{}://{}:{port}", device.name(), host_in_url(host)?);
        let settings = Settings::resolve(File { pool: Some(url.clone()), ..flags }).map_err(Failure::Told)?;
        let token = settings.token().map_err(Failure::Told)?;
        let options = farside::Options { token, insecure_udp, tls_ca: None };
        let pool = farside::connect_with(&url, &options).map_err(|error| match error {
            Error::Open(_, OpenError::Silent | OpenError::Broken(_)) => Failure::Told(format!(
                "{error}; 'farside perf {test}', without a HOST, serves at that port, on that host alone unless \
                 --bind says more"
            )),
            other => other.into(),
        })?;
        Ok(Place { pool, store: STORE.into(), node: url, _lent: None, _node: None })
    }

    /// On a node that is started, or in this process.
    ///
    /// # Errors
    /// There is no memory for it, or it does not start.
    pub(super) fn started(fabric: FabricArg) -> Result<Place, Failure> {
        check_available(MEMORY, "end programs that have it")?;
        let (pool, node) = match fabric {
            FabricArg::Local => (Pool::serve_here(MEMORY)?, None),
            other => {
                let node = NodeProcess::start(MEMORY, &[other])?;
                (node.pool(other)?, Some(node))
            }
        };
        pool.create_store(&raw_store(STORE, QUOTA))?;
        let told = if node.is_some() { "started for this" } else { "in this process" };
        Ok(Place { pool, store: STORE.into(), node: told.into(), _lent: None, _node: node })
    }

    /// On a node that was there, in a store that is dropped at the end.
    ///
    /// # Errors
    /// The node is not reached, or has no room.
    pub(super) fn on_pool(flags: File, insecure_udp: bool, puts: bool) -> Result<Place, Failure> {
        let settings = Settings::resolve(flags).map_err(Failure::Told)?;
        let pool = connect(&Settings { insecure_udp, ..settings })?;
        let new =
            raw_store(&format!("perf-{}", std::process::id()), if puts { QUOTA_OF_PUTS } else { QUOTA_LENT });
        let lent = Lent::make(&pool, &new, "give --fabric in place of --pool, to have a node started")?;
        let node = pool.url().to_owned();
        Ok(Place { pool, store: new.name, node, _lent: Some(lent), _node: None })
    }
}

fn raw_store(name: &str, quota: u64) -> NewStore {
    NewStore { kind: raw::KIND.into(), ..NewStore::prism_kv(name, quota) }
}

/// A host's name or address, as it stands in a url.
fn host_in_url(host: &str) -> Result<String, Failure> {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    if bare.parse::<Ipv6Addr>().is_ok() {
        return Ok(format!("[{bare}]"));
    }
    let is_none = host.is_empty() || host.contains(|c: char| c.is_whitespace() || ":/,[]".contains(c));
    if is_none {
        return Err(Failure::Told(format!(
            "'{host}' is no host: give a name or an address, its port by --port, and a url by --pool"
        )));
    }
    Ok(host.to_owned())
}

/// A node with a store to measure in, for clients elsewhere.
pub(super) struct Server {
    pub(super) name: String,
    pub(super) bind: IpAddr,
    pub(super) port: u16,
    /// What alone is served, if not both.
    pub(super) device: Option<Device>,
    pub(super) tokens: Option<PathBuf>,
    pub(super) insecure_udp: bool,
}

impl Server {
    /// Serves until a signal comes.
    ///
    /// # Errors
    /// It cannot be served there, or not so.
    pub(super) fn serve(self) -> Done {
        // Before anything that takes time, so that no signal is missed.
        let mut signals = signal_hook::iterator::Signals::new(signals::ending())?;
        let tokens = self.tokens.as_deref().map(token::read).transpose().map_err(Failure::Told)?;
        if self.insecure_udp && (tokens.is_none() || self.device == Some(Device::Tcp)) {
            return Err(Failure::Told(
                "--insecure-udp leaves packets of udp in the clear that --tokens would seal, and one of both is not \
                 given: give it, or leave --insecure-udp out"
                    .into(),
            ));
        }
        check_available(MEMORY, "end programs that have it")?;
        let at = SocketAddr::new(self.bind, self.port);
        let (tcp, udp) = (Listen::Tcp(at), Listen::Udp(at));
        let listen = match self.device {
            None => vec![tcp, udp],
            Some(Device::Tcp) => vec![tcp],
            Some(Device::Udp) => vec![udp],
        };
        let insecure_udp = self.insecure_udp;
        let options = Options { listen, tokens, insecure_udp, ..Options::default() };
        let memory = Mapping::create(MEMORY, Pages::Auto)?;
        let host = Host::start(memory, kinds(), options).map_err(|error| self.unservable(error))?;
        host.ask(raw_store(STORE, QUOTA).ask(), Duration::from_secs(60))?;
        let at: Vec<String> = host.listening().iter().map(Listen::to_string).collect();
        tell!("farside: perf serves at {}", at.join(" and "));
        tell!("Measure from another terminal, or machine: {}", self.hint(host.listening()));
        tell!("Any test, one client after another. Press Ctrl-C to stop.");
        signals.forever().next();
        host.stop();
        Ok(())
    }

    /// How a client would ask.
    fn hint(&self, listening: &[Listen]) -> String {
        let at = listening.iter().find_map(|listen| match listen {
            Listen::Tcp(at) => Some((*at, "")),
            Listen::Udp(at) => Some((*at, " -d udp")),
            _ => None,
        });
        let (at, device) = at.expect("it serves one of both");
        let host = if at.ip().is_unspecified() { "HOST".into() } else { at.ip().to_string() };
        let port = if at.port() == PORT { String::new() } else { format!(" -p {}", at.port()) };
        let token = if self.tokens.is_some() { " --token-file PATH" } else { "" };
        format!("farside perf {} {host}{port}{device}{token}", self.name)
    }

    fn unservable(&self, error: BindError) -> Failure {
        let at = SocketAddr::new(self.bind, self.port);
        Failure::Told(match error {
            BindError::Listen(url, error) if error.kind() == ErrorKind::AddrInUse => format!(
                "another program listens at {url}, perhaps another perf server: measure with that one, end it, or \
                 give another --port here and to clients"
            ),
            BindError::Listen(url, error) => {
                format!("could not listen at {url}: {error}; give another --bind or --port")
            }
            BindError::NoTokens(_) => format!(
                "{at} is open to other machines: say who may measure by --tokens ('farside token new --store \
                 {STORE}=all' makes an entry), or leave --bind out to serve this machine alone"
            ),
            other => other.to_string(),
        })
    }
}
