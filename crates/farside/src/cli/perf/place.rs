//! Finds or starts the node that `perf` measures: a perf server, a node that this command starts, or an existing node.
//! Also runs a perf server.
//!
//! Invariant: the measured store is plain memory, and no other program is meant to use it.

use crate::cli::bench::{Dropping, FabricArg, NodeProcess, TemporaryStore};
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

/// Default port of a perf server, the same as perftest's.
pub(super) const PORT: u16 = 18515;
/// Name of the store on a perf server, or on a node that this command starts.
const STORE: &str = "perf";
/// Bytes of memory of a node that only `perf` uses. The system allocates a page when it is first written.
const MEMORY: u64 = 256 << 20;
/// Quota of the store on such a node, in bytes.
const QUOTA: u64 = 192 << 20;
/// Quota of a store on an existing node, in bytes: at least twice the bytes that 64 tasks read and write.
const QUOTA_TEMPORARY: u64 = 16 << 20;
/// Quota of a store on an existing node for PUT chains, in bytes. It is larger, because each request takes a buffer
/// that is free again only after the grace period.
const QUOTA_OF_PUTS: u64 = 128 << 20;
const _: () = assert!(QUOTA_TEMPORARY / 2 >= (64 << 16) + (1 << 20));

/// Transport between server and client.
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

/// Parses, for clap, a transport between server and client.
pub(super) fn device(text: &str) -> Result<Device, String> {
    match text {
        "tcp" => Ok(Device::Tcp),
        "udp" => Ok(Device::Udp),
        _ => Err(format!(
            "'{text}' is not a transport of a perf server, and RDMA devices are not supported: give tcp or udp; on one \
             host, --fabric offers more"
        )),
    }
}

/// The node and store to measure.
pub(super) struct Place {
    pub(super) pool: Pool,
    pub(super) store: String,
    /// Description of the node, for the report's readers.
    pub(super) node: String,
    /// The store on an existing node, which is dropped at the end; `None` for other nodes.
    _temporary: Option<TemporaryStore>,
    /// The child process of the node, if this command started one.
    _node: Option<NodeProcess>,
}

impl Place {
    /// Connects to a perf server.
    ///
    /// # Errors
    /// The host is invalid, or no server responds there. Without a response, this takes at most a second after the
    /// lookup of the host's name.
    pub(super) fn at_host(
        host: &str,
        port: u16,
        device: Device,
        test: &str,
        flags: File,
        insecure_udp: bool,
    ) -> Result<Place, Failure> {
        let url = format!("{}://{}:{port}", device.name(), host_in_url(host)?);
        let settings =
            Settings::resolve(File { pool: Some(url.clone()), ..flags }).map_err(Failure::Error)?;
        let token = settings.token().map_err(Failure::Error)?;
        let options = farside::Options { token, insecure_udp, tls_ca: None };
        let pool = farside::connect_with(&url, &options).map_err(|error| match error {
            Error::Open(_, OpenError::Silent | OpenError::Broken(_)) => Failure::Error(format!(
                "{error}; start the server on that host with 'farside perf {test}', without a HOST; other machines can \
                 reach it only with --bind"
            )),
            other => other.into(),
        })?;
        Ok(Place { pool, store: STORE.into(), node: url, _temporary: None, _node: None })
    }

    /// Starts a node, in its own process or in this one.
    ///
    /// # Errors
    /// The machine has not enough memory, or the node does not start.
    pub(super) fn started(fabric: FabricArg) -> Result<Place, Failure> {
        check_available(MEMORY, "stop other programs")?;
        let (pool, node) = match fabric {
            FabricArg::Local => (Pool::serve_here(MEMORY)?, None),
            other => {
                let node = NodeProcess::start(MEMORY, &[other])?;
                (node.pool(other)?, Some(node))
            }
        };
        pool.create_store(&raw_store(STORE, QUOTA))?;
        let reported = if node.is_some() { "started for this test" } else { "in this process" };
        Ok(Place { pool, store: STORE.into(), node: reported.into(), _temporary: None, _node: node })
    }

    /// Connects to an existing node and creates a store there, which is dropped at the end. `puts`: the test runs PUT
    /// chains.
    ///
    /// # Errors
    /// The node cannot be reached, or has no space for the store.
    pub(super) fn on_pool(flags: File, insecure_udp: bool, puts: bool) -> Result<Place, Failure> {
        let settings = Settings::resolve(flags).map_err(Failure::Error)?;
        let pool = connect(&Settings { insecure_udp, ..settings })?;
        let new = raw_store(
            &format!("perf-{}", std::process::id()),
            if puts { QUOTA_OF_PUTS } else { QUOTA_TEMPORARY },
        );
        let temporary = TemporaryStore::make(
            &pool,
            (&new.name, new.quota),
            Dropping::STORE,
            || pool.create_store(&new).map(drop),
            "give --fabric instead of --pool, to start a node",
        )?;
        let node = pool.url().to_owned();
        Ok(Place { pool, store: new.name, node, _temporary: Some(temporary), _node: None })
    }
}

fn raw_store(name: &str, quota: u64) -> NewStore {
    NewStore { kind: raw::KIND.into(), ..NewStore::prism_kv(name, quota) }
}

/// Returns a host's name or address in the form in which a URL contains it.
fn host_in_url(host: &str) -> Result<String, Failure> {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    if bare.parse::<Ipv6Addr>().is_ok() {
        return Ok(format!("[{bare}]"));
    }
    let is_none = host.is_empty() || host.contains(|c: char| c.is_whitespace() || ":/,[]".contains(c));
    if is_none {
        return Err(Failure::Error(format!(
            "'{host}' is not a host: give a name or an address; the port goes to --port, a URL to --pool"
        )));
    }
    Ok(host.to_owned())
}

/// A perf server: a node with a store, for clients in other processes.
pub(super) struct Server {
    pub(super) name: String,
    pub(super) bind: IpAddr,
    pub(super) port: u16,
    /// The only transport to serve; `None` to serve both.
    pub(super) device: Option<Device>,
    pub(super) tokens: Option<PathBuf>,
    pub(super) insecure_udp: bool,
}

impl Server {
    /// Starts the node, prints its addresses, and serves until a signal arrives.
    ///
    /// # Errors
    /// The address or the combination of flags cannot be served.
    pub(super) fn serve(self) -> Done {
        // The signals are registered first, so that none is missed.
        let mut signals = signal_hook::iterator::Signals::new(signals::ending())?;
        let tokens = self.tokens.as_deref().map(token::read).transpose().map_err(Failure::Error)?;
        if self.insecure_udp && (tokens.is_none() || self.device == Some(Device::Tcp)) {
            return Err(Failure::Error(
                "--insecure-udp turns off the encryption that --tokens gives to udp packets: serve udp with --tokens, \
                 or omit --insecure-udp"
                    .into(),
            ));
        }
        check_available(MEMORY, "stop other programs")?;
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
        print_line!("farside: perf serves at {}", at.join(" and "));
        print_line!("Measure from another terminal, or machine: {}", self.hint(host.listening()));
        print_line!("Any test, one client after another. Press Ctrl-C to stop.");
        signals.forever().next();
        host.stop();
        Ok(())
    }

    /// Returns the command line with which a client measures this server.
    fn hint(&self, listening: &[Listen]) -> String {
        let at = listening.iter().find_map(|listen| match listen {
            Listen::Tcp(at) => Some((*at, "")),
            Listen::Udp(at) => Some((*at, " -d udp")),
            _ => None,
        });
        let (at, device) = at.expect("it serves tcp or udp");
        let host = if at.ip().is_unspecified() { "HOST".into() } else { at.ip().to_string() };
        let port = if at.port() == PORT { String::new() } else { format!(" -p {}", at.port()) };
        let token = if self.tokens.is_some() { " --token-file PATH" } else { "" };
        format!("farside perf {} {host}{port}{device}{token}", self.name)
    }

    fn unservable(&self, error: BindError) -> Failure {
        let at = SocketAddr::new(self.bind, self.port);
        Failure::Error(match error {
            BindError::Listen(url, error) if error.kind() == ErrorKind::AddrInUse => format!(
                "another program listens at {url}, perhaps another perf server: use that server, stop it, or give \
                 another --port here and to the clients"
            ),
            BindError::Listen(url, error) => {
                format!("could not listen at {url}: {error}; give another --bind or --port")
            }
            BindError::NoTokens(_) => format!(
                "{at} is open to other machines: list the allowed clients with --tokens ('farside token new --store \
                 {STORE}=all' makes an entry), or omit --bind to serve this machine alone"
            ),
            other => other.to_string(),
        })
    }
}
