//! Which nodes there are, how each is reached, and what can be asked of them besides data.

use crate::client::Client;
use crate::config::DATA_PORT as PORT;
use crate::endpoint::Endpoint;
use crate::error::Error;
use farside_fabrics::executor::block_on;
use farside_fabrics::layer::fault::{FaultLine, Faults, Strikes, Struck};
use farside_fabrics::local::{self, LocalNode};
use farside_fabrics::memory::{Mapping, Pages};
use farside_fabrics::ring::RingLine;
use farside_fabrics::session::TOKEN_BYTES_MAX;
use farside_fabrics::session::carrier::Line;
use farside_fabrics::session::client::Config;
use farside_fabrics::session::endpoint::{Endpoint as Remote, OpenError};
use farside_fabrics::shm;
use farside_fabrics::tcp::TcpLine;
#[cfg(feature = "tls")]
use farside_fabrics::tcp::tls::{HostName, TlsLine, Trust};
use farside_fabrics::udp::UdpLine;
use farside_fabrics::udp::seal::Shared;
use farside_node::access::Fingerprint;
use farside_node::host::{self, Host};
use farside_remote::control::{Answer, Ask, NodeInfo, Store, StoreStat};
use farside_remote::fabric::ServiceId;
use farside_remote::{Fabric, FabricError, NodeId};
use farside_systems::kv::prism_kv;
use farside_systems::registry;
use farside_systems::system::Sizing;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The memory node that a url names. Cheap to clone, and shared by threads.
#[derive(Clone)]
pub struct Pool {
    url: String,
    reach: Reach,
    token: Option<Arc<str>>,
    /// By what packets of UDP are sealed.
    shared: Option<Shared>,
    faults: Option<Arc<Injected>>,
}

/// Faults of all carriers of a pool.
struct Injected {
    faults: Faults,
    struck: Arc<Struck>,
    carriers: AtomicU64,
}

/// How to connect. Its text never shows the token.
#[derive(Clone, Default)]
pub struct Options {
    /// What is shown to the node to be let in: at most 512 bytes. Who is asked for none need not have one; over `shm:`
    /// and `local:` nobody is.
    pub token: Option<String>,
    /// Certificates in PEM, by which a node over `tls:` is known: its own, or of those who sign such. There is no other
    /// that is trusted.
    pub tls_ca: Option<String>,
    /// Send `udp:` packets in the clear although there is a token, to a node that was started so: whoever sees them can
    /// read them, the token included, and forge them. Without a token they always go in the clear.
    pub insecure_udp: bool,
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options")
            .field("token", &self.token.as_ref().map(|_| "(not shown)"))
            .field("tls_ca", &self.tls_ca)
            .field("insecure_udp", &self.insecure_udp)
            .finish()
    }
}

#[derive(Clone)]
enum Reach {
    Shm(PathBuf),
    Local(Arc<Host>),
    Udp(SocketAddr),
    Tcp(SocketAddr),
    #[cfg(feature = "tls")]
    Tls(SocketAddr, HostName, Trust),
    Ring(PathBuf),
}

/// A store that is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewStore {
    /// 1 to 64 letters, digits, `-`, `_` or `.`.
    pub name: String,
    /// Which system, as 'farside store create --help' lists them: `prism-kv`, or one of its rivals; or `raw`, plain
    /// memory to measure with, which has no items.
    pub kind: String,
    /// Bytes for the table and the items together.
    pub quota: u64,
    /// Items that the table is to have room for; from the quota if absent.
    pub items: Option<u64>,
    /// Whether keys of 8 bytes are numbers that each have a slot of their own: the paper's collision-free layout.
    pub collision_free: bool,
}

impl NewStore {
    /// A PRISM-KV store of that name with a quota of so many bytes.
    pub fn prism_kv(name: impl Into<String>, quota: u64) -> NewStore {
        let kind = prism_kv::KIND.to_owned();
        NewStore { name: name.into(), kind, quota, items: None, collision_free: false }
    }

    /// The question that asks a node for it.
    #[doc(hidden)]
    pub fn ask(&self) -> Ask {
        let sizing = Sizing { items: self.items, collision_free: self.collision_free, ..Sizing::default() };
        // A kind that this release does not know the node refuses, whatever its parameters.
        let system = registry::named(&self.kind);
        let parameters = system.map_or_else(|| sizing.parameters(), |system| (system.parameters)(&sizing));
        Ask::CreateStore { name: self.name.clone(), kind: self.kind.clone(), parameters, quota: self.quota }
    }
}

/// The memory of the node that `local:` starts, in bytes, if the url names no size.
const LOCAL_MEMORY: u64 = 256 << 20;

/// Connects to the memory node at `url`:
///
/// * `shm:PATH`, or just a path: the node of this host that serves at that unix socket;
/// * `ring:PATH`: the node of this host that serves rings at that unix socket, whose engine runs what is asked;
/// * `udp://HOST:PORT`, `tcp://HOST:PORT` or `tls://HOST:PORT`: a node anywhere, whose engine runs what is asked; with
///   a token, packets of `udp` are sealed, so that nobody on the way can read or forge them; TLS takes
///   [`connect_with`], and [`Options::tls_ca`];
/// * `local:` or `local:BYTES`: a node in this process, with a store `default`, gone when the last clone is.
///
/// # Errors
/// The url is none, nobody serves there, or the node is stopped; takes a second at most.
pub fn connect(url: &str) -> Result<Pool, Error> {
    connect_with(url, &Options::default())
}

/// As [`connect`], with a token for the node to see: it says which stores may be used, and how; or with certificates
/// that the node is known by.
///
/// # Errors
/// As [`connect`]; the token is too long; the node knows it not, or has locked out who showed too many wrong ones; the
/// certificates are none, or the node shows another.
pub fn connect_with(url: &str, options: &Options) -> Result<Pool, Error> {
    if let Some(len) = options.token.as_ref().map(String::len).filter(|&len| len > TOKEN_BYTES_MAX) {
        return Err(Error::Token(format!(
            "the token has {len} bytes, and at most {TOKEN_BYTES_MAX} are possible: use one that 'farside token new' \
             made"
        )));
    }
    let token = options.token.as_deref().map(Arc::from);
    let sealing = options.token.as_ref().filter(|_| !options.insecure_udp);
    let shared = sealing.map(|token| Fingerprint::of(token.as_bytes()).shared());
    let reach = reach(url, options)?;
    let pool = Pool { url: with_port(url), reach, token, shared, faults: None };
    if let Reach::Local(_) = pool.reach {
        let quota = pool.info()?.unassigned_bytes * 9 / 10;
        pool.create_store(&NewStore::prism_kv("default", quota >> 20 << 20))?;
    } else {
        pool.info()?;
    }
    Ok(pool)
}

fn reach(url: &str, options: &Options) -> Result<Reach, Error> {
    if url.contains(',') {
        return Err(Error::Url(format!(
            "'{url}' names several nodes: name one, a pool of several is not possible yet"
        )));
    }
    match url.split_once(':') {
        Some(("shm", path)) => Ok(Reach::Shm(path_of(url, path)?)),
        Some(("ring", path)) => Ok(Reach::Ring(path_of(url, path)?)),
        Some(("local", size)) => {
            let bytes = match size {
                "" => LOCAL_MEMORY,
                size => crate::config::parse_bytes(size).map_err(Error::Url)?,
            };
            Ok(Pool::serve_here(bytes)?.reach)
        }
        Some(("udp", address)) => Ok(Reach::Udp(address_of(url, address)?)),
        Some(("tcp", address)) => Ok(Reach::Tcp(address_of(url, address)?)),
        Some(("tls", address)) => by_tls(url, address, options),
        Some((scheme, _)) if !scheme.contains('/') => Err(Error::Url(format!(
            "'{url}': this release has no fabric '{scheme}': use shm:PATH or ring:PATH for a node on this host, \
             udp://HOST:PORT, tcp://HOST:PORT or tls://HOST:PORT for one anywhere, or local:"
        ))),
        _ => Ok(Reach::Shm(path_of(url, url)?)),
    }
}

fn path_of(url: &str, path: &str) -> Result<PathBuf, Error> {
    if path.is_empty() {
        return Err(Error::Url(format!("'{url}' names no socket: write shm:PATH or ring:PATH")));
    }
    Ok(PathBuf::from(path))
}

/// Why nothing goes by TLS where this crate was built without it.
#[doc(hidden)]
pub const NO_TLS: &str =
    "this farside was built without TLS: build it with the feature 'tls', which is on by default";

#[cfg(not(feature = "tls"))]
fn by_tls(_url: &str, _rest: &str, _options: &Options) -> Result<Reach, Error> {
    Err(Error::Trust(NO_TLS.into()))
}

#[cfg(feature = "tls")]
fn by_tls(url: &str, rest: &str, options: &Options) -> Result<Reach, Error> {
    let address = address_of(url, rest)?;
    let name = HostName::parse(&host_of(rest)).map_err(|reason| Error::Url(format!("'{url}': {reason}")))?;
    let Some(certificates) = &options.tls_ca else {
        return Err(Error::Trust(format!(
            "'{url}' is known by a certificate: name the file that has it, or its signer's, by --tls-ca, \
             FARSIDE_TLS_CA or 'tls_ca' in the settings file; in a program, by Options::tls_ca"
        )));
    };
    let trust = Trust::from_pem(certificates.as_bytes());
    let trust = trust.map_err(|reason| {
        Error::Trust(format!(
            "what is to be trusted {reason}: look at the file that --tls-ca, FARSIDE_TLS_CA or 'tls_ca' in the \
             settings file names"
        ))
    })?;
    Ok(Reach::Tls(address, name, trust))
}

/// The host's name in what follows a url's scheme.
#[cfg(feature = "tls")]
fn host_of(rest: &str) -> String {
    let host = rest.trim_matches('/');
    if has_port(host) { host.rsplit_once(':').map_or(host, |(name, _)| name) } else { host }.to_owned()
}

/// Whether a port follows the host's name; an address of IPv6 has colons of its own.
fn has_port(host: &str) -> bool {
    host.rsplit_once(':').is_some_and(|(before, _)| !before.contains(':') || before.ends_with(']'))
}

/// The url with the port that is taken where it names none: so that whoever is told of it sees which.
fn with_port(url: &str) -> String {
    match url.split_once("://") {
        Some((scheme @ ("udp" | "tcp" | "tls"), host)) if !has_port(host) => {
            let host = host.trim_end_matches('/').trim_matches(['[', ']']);
            let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
            format!("{scheme}://{host}:{PORT}")
        }
        _ => url.to_owned(),
    }
}

/// All addresses of the host in a url such as `tcp://HOST:PORT`; the first is the one that is taken.
///
/// # Errors
/// There is none; says why, and the remedy.
pub fn addresses(url: &str) -> Result<Vec<SocketAddr>, Error> {
    addresses_of(url, url.split_once(':').map_or(url, |(_, rest)| rest))
}

fn address_of(url: &str, rest: &str) -> Result<SocketAddr, Error> {
    Ok(addresses_of(url, rest)?[0])
}

/// One at least.
fn addresses_of(url: &str, rest: &str) -> Result<Vec<SocketAddr>, Error> {
    let wrong = |why: String| Error::Url(format!("'{url}': {why}: write it like tcp://127.0.0.1:{PORT}"));
    let host = rest.strip_prefix("//").ok_or_else(|| wrong("no // follows the scheme".into()))?;
    let host = host.strip_suffix('/').unwrap_or(host);
    if host.is_empty() {
        return Err(wrong("it names no host".into()));
    }
    let found = if has_port(host) {
        host.to_socket_addrs()
    } else {
        (host.trim_matches(['[', ']']), PORT).to_socket_addrs()
    };
    let found = found.map_err(|error| match error.kind() {
        std::io::ErrorKind::InvalidInput => wrong(error.to_string()),
        _ => Error::Url(format!("'{url}': {error}: look whether the host's name is right")),
    })?;
    let found: Vec<SocketAddr> = found.collect();
    if found.is_empty() { Err(wrong("the host has no address".into())) } else { Ok(found) }
}

impl Pool {
    /// What carries its requests, as its url begins: `shm`, `local`, `ring`, `udp`, `tcp` or `tls`.
    pub fn fabric(&self) -> &'static str {
        match self.reach {
            Reach::Shm(_) => "shm",
            Reach::Local(_) => "local",
            Reach::Udp(_) => "udp",
            Reach::Tcp(_) => "tcp",
            #[cfg(feature = "tls")]
            Reach::Tls(..) => "tls",
            Reach::Ring(_) => "ring",
        }
    }

    /// The url by which it was named.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// A client of the store called `name`, with a thread of its own.
    ///
    /// # Errors
    /// There is no such store, or the node has no room for one more session.
    pub fn open(&self, name: &str) -> Result<Client, Error> {
        Client::start(self.clone(), name)
    }

    /// Makes a store; answers it as the catalog has it.
    ///
    /// # Errors
    /// The name is taken, or there is not so much memory; nothing was made.
    pub fn create_store(&self, new: &NewStore) -> Result<Store, Error> {
        match self.ask(&new.ask())? {
            Answer::Store(store) => Ok(store),
            other => Err(misunderstood(&other)),
        }
    }

    /// Gives a store another table, with room for so many items, or for what it holds; answers once that has begun.
    /// What is in the store is moved while it is used: until then [`Store::former`] is there.
    ///
    /// # Errors
    /// There is no such store, it is being rebuilt, or the node has no memory for the table; nothing was changed.
    pub fn rebuild_store(&self, name: &str, items: Option<u64>) -> Result<(), Error> {
        // For no number at all the least table is asked for that holds what there is.
        let parameters = serde_json::json!({ "items": items.unwrap_or(0) }).to_string();
        self.ask(&Ask::RebuildStore { name: name.to_owned(), parameters }).map(drop)
    }

    /// Takes a store away with all that is in it. Its memory is zeros before anyone else has it.
    ///
    /// # Errors
    /// There is no such store.
    pub fn drop_store(&self, name: &str) -> Result<(), Error> {
        self.ask(&Ask::DropStore { name: name.to_owned() }).map(drop)
    }

    /// All stores, without their keys.
    ///
    /// # Errors
    /// The node has no answer.
    pub fn stores(&self) -> Result<Vec<Store>, Error> {
        match self.ask(&Ask::ListStores)? {
            Answer::Stores(stores) => Ok(stores),
            other => Err(misunderstood(&other)),
        }
    }

    /// How a store's memory is used.
    ///
    /// # Errors
    /// There is no such store.
    pub fn stat(&self, name: &str) -> Result<StoreStat, Error> {
        match self.ask(&Ask::StoreStat { name: name.to_owned() })? {
            Answer::StoreStat(stat) => Ok(stat),
            other => Err(misunderstood(&other)),
        }
    }

    /// About the node.
    ///
    /// # Errors
    /// The node has no answer.
    pub fn info(&self) -> Result<NodeInfo, Error> {
        match self.ask(&Ask::NodeInfo)? {
            Answer::NodeInfo(info) => Ok(info),
            other => Err(misunderstood(&other)),
        }
    }

    fn ask(&self, ask: &Ask) -> Result<Answer, Error> {
        let endpoint = self.endpoint()?;
        endpoint.set_patience(ask.patience());
        let request = serde_json::to_vec(ask).expect("plain data");
        let mut answer = Vec::new();
        block_on(&endpoint, endpoint.call(NodeId(0), ServiceId::NODE, &request, &mut answer))?;
        serde_json::from_slice(&answer).map_err(|error| {
            Error::Fabric(FabricError::Refused(format!(
                "the node's answer is not understood ({error}): use the same release on both sides"
            )))
        })
    }

    /// A node in this process with so many bytes of memory and no store.
    ///
    /// # Errors
    /// The system has no such memory.
    #[doc(hidden)]
    pub fn serve_here(memory: u64) -> Result<Pool, Error> {
        let host =
            Host::start(Mapping::create(memory, Pages::Auto)?, registry::kinds(), host::Options::default())?;
        Ok(Pool {
            url: format!("local:{memory}"),
            reach: Reach::Local(Arc::new(host)),
            token: None,
            shared: None,
            faults: None,
        })
    }

    /// The same node, to which datagrams go with these faults, and come back with them.
    ///
    /// # Errors
    /// What carries them there cannot have such faults.
    #[doc(hidden)]
    pub fn with_faults(self, faults: Faults) -> Result<Pool, Error> {
        let checked = match self.reach {
            Reach::Udp(_) => faults.check(UdpLine::IS_RELIABLE).map_err(|impossible| impossible.0),
            Reach::Tcp(_) => faults.check(TcpLine::IS_RELIABLE).map_err(|impossible| impossible.0),
            #[cfg(feature = "tls")]
            Reach::Tls(..) => faults.check(TlsLine::IS_RELIABLE).map_err(|impossible| impossible.0),
            _ => Err("no datagram goes there that could meet with faults: use udp:// or tcp://".into()),
        };
        checked.map_err(|reason| Error::Url(format!("{}: {reason}", self.url)))?;
        let injected = Injected { faults, struck: Arc::default(), carriers: AtomicU64::new(0) };
        Ok(Pool { faults: Some(Arc::new(injected)), ..self })
    }

    /// What has struck so far, of the faults that it was given.
    #[doc(hidden)]
    pub fn strikes(&self) -> Option<Strikes> {
        self.faults.as_ref().map(|injected| injected.struck.so_far())
    }

    /// A session with the node, for the calling thread.
    ///
    /// # Errors
    /// As [`connect`].
    #[doc(hidden)]
    pub fn endpoint_here(&self) -> Result<Endpoint, Error> {
        self.endpoint()
    }

    /// A session with the node, for the calling thread.
    pub(crate) fn endpoint(&self) -> Result<Endpoint, Error> {
        match &self.reach {
            Reach::Shm(path) => Ok(Endpoint::Direct(shm::connect(path, NodeId(0))?)),
            Reach::Local(host) => {
                let node: Arc<dyn LocalNode> = Arc::clone(host) as _;
                Ok(Endpoint::Direct(local::connect(&node)?))
            }
            Reach::Udp(address) => {
                let line = UdpLine::connect(*address, self.shared.clone());
                match &self.faults {
                    None => Ok(Endpoint::Udp(self.dialled(line)?)),
                    Some(injected) => Ok(Endpoint::FaultyUdp(self.dialled(injected.strike(line))?)),
                }
            }
            Reach::Tcp(address) => {
                let line = TcpLine::connect(*address);
                match &self.faults {
                    None => Ok(Endpoint::Tcp(self.dialled(line)?)),
                    Some(injected) => Ok(Endpoint::FaultyTcp(self.dialled(injected.strike(line))?)),
                }
            }
            #[cfg(feature = "tls")]
            Reach::Tls(address, name, trust) => {
                let line = TlsLine::connect(*address, name, trust);
                let line = line.map_err(|error| Error::Tls(self.url.clone(), error))?;
                match &self.faults {
                    None => Ok(Endpoint::Tls(self.remote(line)?)),
                    Some(injected) => Ok(Endpoint::FaultyTls(self.dialled(injected.strike(Ok(line)))?)),
                }
            }
            Reach::Ring(path) => Ok(Endpoint::Ring(self.remote(RingLine::connect(path)?)?)),
        }
    }

    fn dialled<L: Line>(&self, line: std::io::Result<L>) -> Result<Box<Remote<L>>, Error> {
        let broken = |error: std::io::Error| Error::Open(self.url.clone(), OpenError::Broken(error.into()));
        self.remote(line.map_err(broken)?)
    }

    fn remote<L: Line>(&self, line: L) -> Result<Box<Remote<L>>, Error> {
        let opened = Remote::open(line, NodeId(0), self.who());
        opened.map(Box::new).map_err(|error| Error::Open(self.url.clone(), error))
    }

    /// A client that nobody has met.
    fn who(&self) -> Config {
        let random = || getrandom::u64().expect("the system has random bytes: nonces must not be guessed");
        let identity = u128::from(random()) << 64 | u128::from(random());
        let token = self.token.as_ref().map_or_else(Vec::new, |token| token.as_bytes().to_vec());
        Config { identity, incarnation: 1, nonce: random(), token, ..Config::default() }
    }
}

impl Injected {
    fn strike<L: Line>(&self, line: std::io::Result<L>) -> std::io::Result<FaultLine<L>> {
        let faults = self.faults.of_carrier(self.carriers.fetch_add(1, Ordering::Relaxed));
        Ok(FaultLine::new(line?, &faults, &self.struck).expect("they were checked when they were given"))
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("url", &self.url).finish_non_exhaustive()
    }
}

fn misunderstood(answer: &Answer) -> Error {
    Error::Fabric(FabricError::Refused(format!(
        "the node answered something else ({answer:?}): use the same release on both sides"
    )))
}
