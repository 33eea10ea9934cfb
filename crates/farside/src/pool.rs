//! Connections to a memory node: its URL, its fabric, and the control operations on its stores.

mod etcd;
mod nodes;

pub use nodes::join as join_urls;

use crate::client::Client;
use crate::config::DATA_PORT as PORT;
use crate::endpoint::{Endpoint, Session};
use crate::error::Error;
use farside_fabrics::executor::block_on;
use farside_fabrics::layer::fault::{FaultLine, Faults, Strikes, Struck};
use farside_fabrics::local::{self, LocalNode};
use farside_fabrics::memory::{Mapping, Pages};
use farside_fabrics::nodes::Nodes;
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
#[cfg(feature = "verbs")]
use farside_fabrics::verbs::{self, VerbsError, VerbsLine};
use farside_node::access::{Fingerprint, GUESSES_WITHIN, LOCKED_FOR};
use farside_node::host::{self, Host, Listen};
use farside_remote::control::{Answer, Ask, NodeInfo, Store, StoreStat};
use farside_remote::fabric::ServiceId;
use farside_remote::{Fabric, FabricError, NodeId};
use farside_systems::heal::{self, Healed};
use farside_systems::index::{Indexing, Keys, Rung};
use farside_systems::kv::prism_kv;
use farside_systems::members;
use farside_systems::registry::{self, Registered};
use farside_systems::store::{Member, StoreError};
use farside_systems::system::Sizing;
use farside_systems::txn::Transacting;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A pool of memory nodes, each named by a url. Returned by [`connect`].
///
/// Most pools have one node. In a pool of several, a store lies on all nodes or on some of them, its members.
/// [`Pool::nodes`] returns the nodes, each as a pool of its own. [`Pool::info`] needs a pool of one node; a pool of
/// several returns [`Error::Url`], and nothing was sent.
///
/// [`Pool::open`] opens a store. The other methods are control operations: [`Pool::create_store`],
/// [`Pool::rebuild_store`], [`Pool::drop_store`], [`Pool::heal`], [`Pool::stores`], [`Pool::stat`] and [`Pool::info`].
/// Each opens sessions, makes calls and blocks until the nodes respond. A call times out after 1 s, or after 30 s if
/// the node must walk, grant or zero a store's memory.
///
/// Cheap to clone; threads may share it.
#[derive(Clone)]
pub struct Pool {
    /// Urls of all nodes, separated by commas.
    url: Arc<str>,
    /// Never empty.
    nodes: Arc<[Node]>,
}

/// Returns the url and the options of each node that a pool's url names. Connects to none.
///
/// # Errors
/// As [`connect`], if the list of nodes is invalid.
#[doc(hidden)]
pub fn nodes_of(url: &str, options: &Options) -> Result<Vec<(String, Options)>, Error> {
    nodes::parse(url, options)
}

/// A node of a pool, and how to reach it.
#[derive(Clone)]
struct Node {
    url: String,
    reach: Reach,
    token: Option<Arc<str>>,
    /// Secret that seals UDP packets.
    shared: Option<Shared>,
    faults: Option<Arc<Injected>>,
    refusal: Arc<Mutex<Option<Refusal>>>,
}

/// The last refusal of a session by a node, to any client of the pool, if no session was opened since.
struct Refusal {
    at: Instant,
    reason: String,
    /// Whether the attempt before was refused, too.
    is_repeated: bool,
}

/// Faults injected into the datagrams of all the pool's sessions.
struct Injected {
    faults: Faults,
    struck: Arc<Struck>,
    carriers: AtomicU64,
}

/// Options of [`connect_with`]. The `Debug` output never contains the token.
#[derive(Clone, Default)]
pub struct Options {
    /// Token that the client presents to the node, at most 512 bytes. It determines which stores the client may use,
    /// and how. Optional if the node requires no token; not used over `shm:` and `local:`.
    pub token: Option<String>,
    /// Trusted certificates for `tls:`, in PEM: the node's own, or those of its signers. Required for `tls:`. No other
    /// certificates are trusted, not even those of the operating system.
    pub tls_ca: Option<String>,
    /// Send `udp:` packets in the clear although a token is set; the node must be started in the same mode. Anyone on
    /// the network path can then read the packets, the token included, and forge them. Without a token, packets are
    /// always in the clear.
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
    #[cfg(feature = "verbs")]
    Verbs(SocketAddr, verbs::Choice),
}

/// Description of a store to create, for [`Pool::create_store`].
///
/// # Example
///
/// ```
/// # fn main() -> Result<(), farside::Error> {
/// use farside::NewStore;
///
/// let pool = farside::connect("local:")?; // a node in this process
/// let store = NewStore { items: Some(10_000), ..NewStore::prism_kv("sessions", 8 << 20) };
/// pool.create_store(&store)?;
/// let kv = pool.open("sessions")?;
/// kv.put("user 7", "signed in").wait()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewStore {
    /// Name of the store: 1 to 64 letters, digits, `-`, `_` or `.`.
    pub name: String,
    /// Kind of the store, as listed by 'farside store create --help': `prism-kv`, one of its rivals, an index such as
    /// `smart`, one of `prism-tx`, `farm` and `fasst` for transactions, or `raw`. A `raw` store is plain memory for
    /// measurements and has no items.
    pub kind: String,
    /// Bytes that the table and the items may take together.
    pub quota: u64,
    /// Number of items that the table has capacity for. Derived from the quota if absent.
    pub items: Option<u64>,
    /// Whether keys of 8 bytes are numbers that each have a slot of their own: the paper's collision-free layout.
    pub collision_free: bool,
    /// Number of buckets that a client reads at once: 1, 2, 4, ... 64. Only for the kinds `chequer` and
    /// `chequer-message`; the kind's default if absent.
    pub block_buckets: Option<u64>,
    /// Length in bytes from which a client writes a value itself, rather than sending it to the node's CPU. Only for
    /// the kinds `chequer` and `chequer-message`; the kind's default if absent.
    pub put_threshold: Option<u32>,
    /// Kind of the keys. Only for indexes; numbers if absent.
    pub keys: Option<Keys>,
    /// How many of its techniques the system uses. Only for indexes, and for measurements; all if absent.
    pub rung: Option<Rung>,
    /// Length of the longest key in bytes. Only for the kinds `farm` and `fasst`, which reserve memory for it; 64 if
    /// absent.
    pub key_max: Option<u32>,
    /// Length of the longest value in bytes. Only for indexes and transactional stores; 8 or 1024 if absent.
    pub value_size: Option<u32>,
    /// Length in bytes of the longest value that lies beside its key; longer ones cost a request more, and less memory
    /// is reserved for each key. Only for indexes; chosen for the longest value if absent.
    pub inline_size: Option<u32>,
    /// Options of transactions. Only for transactional stores.
    pub transacting: Transacting,
    /// Number of nodes that hold a part of the store each; all nodes of the pool if absent. The store's name determines
    /// which nodes these are.
    pub members: Option<usize>,
}

impl NewStore {
    /// A PRISM-KV store with a quota in bytes.
    pub fn prism_kv(name: impl Into<String>, quota: u64) -> NewStore {
        let kind = prism_kv::KIND.to_owned();
        NewStore {
            name: name.into(),
            kind,
            quota,
            items: None,
            collision_free: false,
            block_buckets: None,
            put_threshold: None,
            keys: None,
            rung: None,
            key_max: None,
            value_size: None,
            inline_size: None,
            transacting: Transacting::NONE,
            members: None,
        }
    }

    /// Size of the store's table.
    #[doc(hidden)]
    pub fn sizing(&self) -> Sizing {
        Sizing {
            items: self.items,
            collision_free: self.collision_free,
            block_buckets: self.block_buckets,
            put_threshold: self.put_threshold,
            key_len: self.key_max.unwrap_or(0) as usize,
            value_len: self.value_size.unwrap_or(0) as usize,
            indexing: Indexing {
                keys: self.keys,
                inline_max: self.inline_size,
                rung: self.rung,
                ..Indexing::NONE
            },
            transacting: self.transacting,
            ..Sizing::default()
        }
    }

    /// The control request that creates the store on one node.
    #[doc(hidden)]
    pub fn ask(&self) -> Ask {
        let sizing = self.sizing();
        // The node refuses a kind that this release does not know, whatever its parameters.
        let system = registry::named(&self.kind);
        let parameters = system.map_or_else(|| sizing.parameters(), |system| (system.parameters)(&sizing));
        Ask::CreateStore { name: self.name.clone(), kind: self.kind.clone(), parameters, quota: self.quota }
    }
}

/// Maximum time to wait for the response to a control request that grants or zeroes memory.
const LONGEST_PATIENCE: Duration = Duration::from_secs(30);

/// Pause after a refusal of a session before another is requested, by another thread of the same program.
const REFUSED_NOW: Duration = Duration::from_secs(1);
/// Pause after a refusal of a session before another is requested in the background. The node may have locked out this
/// address for this long.
const REFUSED_PAUSE: Duration = Duration::from_secs(LOCKED_FOR.as_secs() + 2);
/// The same after several refusals. The token is probably wrong. A node locks out addresses from which several wrong
/// tokens come, but forgets those that came this long ago.
const REFUSED_AGAIN_PAUSE: Duration = Duration::from_secs(GUESSES_WITHIN.as_secs() + 15);

/// Default memory of the node that `local:` starts, in bytes.
const LOCAL_MEMORY: u64 = 256 << 20;

/// Connects to the memory node at `url`. Blocks for at most 1 s.
///
/// | Url | Node | Who runs the operations |
/// | --- | --- | --- |
/// | `shm:PATH`, or just `PATH` | on this host, at that unix socket | the client's CPU, on mapped memory |
/// | `ring:PATH` | on this host, at that unix socket | an engine of the node |
/// | `udp://HOST:PORT` | on any host | an engine of the node |
/// | `tcp://HOST:PORT` | on any host | an engine of the node |
/// | `tls://HOST:PORT` | on any host | an engine of the node |
/// | `verbs://HOST:PORT` | on any host, by RDMA | the NICs, and an engine of the node |
/// | `local:` or `local:SIZE` | in this process | the client's CPU |
///
/// Several nodes: their urls with commas between them (`%2C` for a comma within a path), `@` and the path of a TOML
/// file, or `etcd://HOST:PORT,HOST:PORT/PREFIX`. Only a call of this function reads etcd's list, for at most 2 s. If
/// etcd does not answer, the list that was read last is used.
///
/// * The default port is 7460.
/// * `local:` starts a node with `SIZE` bytes of memory, such as `64MiB`; the default is 256 MiB. It creates a store
///   `default`. The node ends when the last clone of the pool is dropped; every client holds a clone.
/// * Packets of `udp:` are sealed if a token is set: nobody on the network path can read or forge them.
/// * `tls:` needs [`connect_with`] and [`Options::tls_ca`].
/// * `verbs:` may end with `?device=NAME&gid=INDEX&mtu=BYTES`; without them, the device that has the address from which
///   the node is reached is used, with the largest packets that both ports permit.
///
/// # Errors
/// The url is invalid, no node serves there, or the node does not respond, for example because its process is stopped.
/// No store was changed.
pub fn connect(url: &str) -> Result<Pool, Error> {
    connect_with(url, &Options::default())
}

/// Connects to the memory node at `url` with a token, trusted certificates, or both. As [`connect`] otherwise.
///
/// # Example
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let options = farside::Options {
///     token: Some(std::fs::read_to_string("reader.token")?.trim().to_owned()),
///     tls_ca: Some(std::fs::read_to_string("cert.pem")?),
///     ..farside::Options::default()
/// };
/// let pool = farside::connect_with("tls://node.example:7460", &options)?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As [`connect`]. Also:
///
/// * [`Error::Token`]: the token is longer than 512 bytes.
/// * [`Error::Trust`]: [`Options::tls_ca`] is absent or holds no valid certificate.
/// * [`Error::Tls`] or [`Error::Open`]: the node presents a certificate that is not trusted, does not know the token,
///   or has locked this client out after too many wrong tokens.
pub fn connect_with(url: &str, options: &Options) -> Result<Pool, Error> {
    let members = nodes::parse(url, options)?;
    let nodes: Vec<Node> =
        members.iter().map(|(url, options)| Node::new(url, options)).collect::<Result<_, _>>()?;
    let pool = Pool::of(nodes);
    match &*pool.nodes {
        [Node { reach: Reach::Local(_), .. }] => {
            let quota = pool.info()?.unassigned_bytes * 9 / 10;
            pool.create_store(&NewStore::prism_kv("default", quota >> 20 << 20))?;
        }
        [_] => drop(pool.info()?),
        _ => pool.check_any_responds()?,
    }
    Ok(pool)
}

fn reach(url: &str, options: &Options) -> Result<Reach, Error> {
    match url.split_once(':') {
        Some(("shm", path)) => Ok(Reach::Shm(path_of(url, path)?)),
        Some(("ring", path)) => Ok(Reach::Ring(path_of(url, path)?)),
        Some(("local", size)) => {
            let bytes = match size {
                "" => LOCAL_MEMORY,
                size => crate::config::parse_bytes(size).map_err(Error::Url)?,
            };
            Ok(Reach::Local(Arc::new(host(bytes, Vec::new())?)))
        }
        Some(("udp", address)) => Ok(Reach::Udp(address_of(url, address)?)),
        Some(("tcp", address)) => Ok(Reach::Tcp(address_of(url, address)?)),
        Some(("tls", address)) => by_tls(url, address, options),
        Some(("verbs", address)) => by_verbs(url, address),
        Some((scheme, _)) if !scheme.contains('/') => Err(Error::Url(format!(
            "'{url}': this release has no fabric '{scheme}': use shm:PATH or ring:PATH for a node on this host, \
             udp://HOST:PORT, tcp://HOST:PORT, tls://HOST:PORT or verbs://HOST:PORT for a node on any host, or local:"
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

/// Error text of a crate built without TLS.
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
            "'{url}' needs a certificate to trust: name the file of the node's certificate, or of its signer's, with \
             --tls-ca, FARSIDE_TLS_CA or 'tls_ca' in the settings file; in a program, set Options::tls_ca"
        )));
    };
    let trust = Trust::from_pem(certificates.as_bytes());
    let trust = trust.map_err(|reason| {
        Error::Trust(format!(
            "the file of trusted certificates {reason}: check the file that --tls-ca, FARSIDE_TLS_CA or 'tls_ca' in \
             the settings file names"
        ))
    })?;
    Ok(Reach::Tls(address, name, trust))
}

/// Error text of a crate built without RDMA.
#[doc(hidden)]
pub const NO_VERBS: &str =
    "this farside was built without RDMA: build it with the feature 'verbs', which is on by default";

#[cfg(not(feature = "verbs"))]
fn by_verbs(_url: &str, _rest: &str) -> Result<Reach, Error> {
    Err(Error::Url(NO_VERBS.into()))
}

#[cfg(feature = "verbs")]
fn by_verbs(url: &str, rest: &str) -> Result<Reach, Error> {
    let (host, query) = rest.split_once('?').unwrap_or((rest, ""));
    let choice = verbs::Choice::parse(query).map_err(|reason| Error::Url(format!("'{url}': {reason}")))?;
    Ok(Reach::Verbs(address_of(url, host)?, choice))
}

/// The host's name in `rest`, the part of a url after its scheme.
#[cfg(feature = "tls")]
fn host_of(rest: &str) -> String {
    let host = rest.trim_matches('/');
    if has_port(host) { host.rsplit_once(':').map_or(host, |(name, _)| name) } else { host }.to_owned()
}

/// Whether a port follows the host's name. The colons of an IPv6 address do not count.
fn has_port(host: &str) -> bool {
    host.rsplit_once(':').is_some_and(|(before, _)| !before.contains(':') || before.ends_with(']'))
}

/// Adds the default port to a url that names none, so that reports show the port in use.
fn with_port(url: &str) -> String {
    match url.split_once("://") {
        Some((scheme @ "verbs", host)) => {
            let (host, query) = host.split_at(host.find('?').unwrap_or(host.len()));
            format!("{}{query}", with_port(&format!("tcp://{host}")).replacen("tcp", scheme, 1))
        }
        Some((scheme @ ("udp" | "tcp" | "tls"), host)) if !has_port(host) => {
            let host = host.trim_end_matches('/').trim_matches(['[', ']']);
            let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
            format!("{scheme}://{host}:{PORT}")
        }
        _ => url.to_owned(),
    }
}

/// All addresses of the host in a url such as `tcp://HOST:PORT`. The client connects to the first. Never empty.
///
/// # Errors
/// The url is invalid or the host has no address. The text names the reason and the remedy.
pub fn addresses(url: &str) -> Result<Vec<SocketAddr>, Error> {
    addresses_of(url, url.split_once(':').map_or(url, |(_, rest)| rest))
}

fn address_of(url: &str, rest: &str) -> Result<SocketAddr, Error> {
    Ok(addresses_of(url, rest)?[0])
}

/// Returns all addresses of the host that `rest`, the part of `url` after its scheme, names. The list is never empty.
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
        _ => Error::Url(format!("'{url}': {error}: check the host's name")),
    })?;
    let found: Vec<SocketAddr> = found.collect();
    if found.is_empty() { Err(wrong("the host has no address".into())) } else { Ok(found) }
}

impl Pool {
    fn of(nodes: Vec<Node>) -> Pool {
        Pool { url: nodes::join(nodes.iter().map(|node| &*node.url)).into(), nodes: nodes.into() }
    }

    /// Joins pools into one, whose nodes are those of all.
    #[doc(hidden)]
    pub fn joined(pools: &[Pool]) -> Pool {
        Pool::of(pools.iter().flat_map(|pool| pool.nodes.iter().cloned()).collect())
    }

    /// The nodes of the pool, each as a pool of its own, in the order of the url. Requests to one node do not wait for
    /// another.
    pub fn nodes(&self) -> impl ExactSizeIterator<Item = Pool> + '_ {
        self.nodes.iter().map(|node| Pool::of(vec![node.clone()]))
    }

    /// Name of the fabric, which is the url's scheme: `shm`, `local`, `ring`, `udp`, `tcp`, `tls` or `verbs`; `mixed`
    /// if the pool's nodes are reached over several fabrics.
    pub fn fabric(&self) -> &'static str {
        let first = self.nodes[0].fabric();
        if self.nodes.iter().all(|node| node.fabric() == first) { first } else { "mixed" }
    }

    /// The nodes' urls, separated by commas, with the default ports filled in.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the only node.
    ///
    /// # Errors
    /// The pool has several.
    fn only(&self) -> Result<&Node, Error> {
        match &*self.nodes {
            [node] => Ok(node),
            several => Err(Error::Url(format!(
                "the pool has {} nodes, and this needs a pool of one: name one of {}",
                several.len(),
                self.url
            ))),
        }
    }

    /// Asks all nodes at the same time for their information.
    ///
    /// # Errors
    /// No node has responded: the error of the first.
    fn check_any_responds(&self) -> Result<(), Error> {
        let mut errors = self.at_all_nodes(|node| node.info()).into_iter().map(Result::err);
        match errors.next().flatten() {
            Some(first) if errors.all(|error| error.is_some()) => Err(first),
            _ => Ok(()),
        }
    }

    /// Opens the store called `name` and returns a client with a thread and a session of its own.
    ///
    /// # Errors
    /// Nothing was changed. The store does not exist, the token has no rights to it, the node cannot be reached, or the
    /// node has no capacity for another session.
    pub fn open(&self, name: &str) -> Result<Client, Error> {
        Client::start(self.clone(), name)
    }

    /// Creates a store; returns its entry in the catalog of its first node. If several nodes are to hold the store,
    /// either all of them have it afterwards or none; each gets an equal part of the quota.
    ///
    /// # Errors
    /// The name is taken, the kind is unknown or does not lie on several nodes, a node cannot be reached or has not
    /// enough unassigned memory: no store was created. If [`Error::ran`] is [`Ran::Unknown`](crate::Ran::Unknown), the
    /// store may have been created: check [`Pool::stores`].
    pub fn create_store(&self, new: &NewStore) -> Result<Store, Error> {
        if self.nodes.len() > 1 || new.members.is_some_and(|members| members != 1) {
            let members = new.members.unwrap_or(self.nodes.len());
            let (name, kind, quota) = (new.name.clone(), new.kind.clone(), new.quota);
            let new = members::New { name, kind, sizing: new.sizing(), quota, members };
            let attempt = [(); 2].map(|()| getrandom::u64().expect("the system has random bytes"));
            let created = self.over_all(async |endpoint| {
                members::create(endpoint, endpoint.nodes(), &new, attempt).await
            })?;
            return Ok(created.into_iter().next().expect("a store has a member").1);
        }
        match self.ask(&new.ask())? {
            Answer::Store(store) => Ok(store),
            other => Err(unexpected_answer(&other)),
        }
    }

    /// Creates a store of any system on the pool's only node, for measurements.
    #[doc(hidden)]
    pub fn create_sized(
        &self,
        system: &Registered,
        name: &str,
        sizing: &Sizing,
        quota: u64,
    ) -> Result<(), Error> {
        let parameters = (system.parameters)(sizing);
        let ask = Ask::CreateStore { name: name.to_owned(), kind: system.kind.to_owned(), parameters, quota };
        self.ask(&ask).map(drop)
    }

    /// Starts to rebuild a store with a table for `items` items; if absent, for the items that it holds. Returns once
    /// the rebuild has started, at all of the store's nodes.
    ///
    /// The items move to the new table while clients use the store. [`Store::former`] is set until all have moved.
    ///
    /// # Errors
    /// The store does not exist, it is already being rebuilt, or the node has no memory for the table: nothing was
    /// changed. If [`Error::ran`] is [`Ran::Unknown`](crate::Ran::Unknown), the rebuild may have started.
    pub fn rebuild_store(&self, name: &str, items: Option<u64>) -> Result<(), Error> {
        if self.nodes.len() > 1 {
            let members = self.members(name)?;
            let store = members[0].stores()?.into_iter().find(|store| store.name == name);
            let shape = store.and_then(|store| registry::shape_of(&store)).unwrap_or_default();
            let items =
                items.map(|items| members::items_of_member(items, members.len(), shape.is_collision_free));
            return members.iter().try_for_each(|member| member.rebuild_store(name, items));
        }
        // 0 requests the smallest table that holds the store's items.
        let parameters = serde_json::json!({ "items": items.unwrap_or(0) }).to_string();
        self.ask(&Ask::RebuildStore { name: name.to_owned(), parameters }).map(drop)
    }

    /// Drops a store and all its items. A node zeroes its memory before another store gets it. Returns the urls of the
    /// nodes that hold a part of the store and did not respond: they free it when a client next opens, creates or drops
    /// a store of this name.
    ///
    /// # Errors
    /// The store does not exist, the node of its first member does not respond or is not in the pool, or the token has
    /// no right to drop it: nothing was changed. If [`Error::ran`] is [`Ran::Unknown`](crate::Ran::Unknown), the store
    /// may have been dropped.
    pub fn drop_store(&self, name: &str) -> Result<Vec<String>, Error> {
        if self.nodes.len() == 1 {
            return self.ask(&Ask::DropStore { name: name.to_owned() }).map(|_| Vec::new());
        }
        self.drop_without(name, members::WithoutFirst::Refuse)
    }

    /// Drops a store as [`Pool::drop_store`] does, although the node of its first member is gone for good. If that node
    /// comes back with its memory, clients find that the store has lost the memory of the others, and can drop it.
    ///
    /// # Errors
    /// As [`Pool::drop_store`], except that the first member's node need not respond.
    pub fn forget_store(&self, name: &str) -> Result<Vec<String>, Error> {
        self.drop_without(name, members::WithoutFirst::Forget)
    }

    pub(crate) fn drop_without(
        &self,
        name: &str,
        first: members::WithoutFirst,
    ) -> Result<Vec<String>, Error> {
        let untold = self
            .over_all(async |endpoint| members::drop_store(endpoint, endpoint.nodes(), name, first).await)?;
        Ok(untold.into_iter().map(|node| self.nodes[node.0 as usize].url.clone()).collect())
    }

    /// Completes creations and drops that dead clients left unfinished, and repairs stores: all, or the one called
    /// `only`. Calls `tell` for each thing that was done or could not be done. Clients may use the stores meanwhile.
    ///
    /// # Errors
    /// No node has responded, or there is no store called `only`; nothing was changed.
    pub fn heal(&self, only: Option<&str>, tell: impl FnMut(Healed)) -> Result<heal::Seen, Error> {
        self.over_all(async |endpoint| {
            let entropy = getrandom::u64().expect("the system has random bytes");
            heal::heal(endpoint, endpoint.nodes(), only, heal::PATIENCE, entropy, tell).await
        })
    }

    /// Lists all stores, without their secrets (`secret` and `id` are zero), sorted by name. A store on several nodes
    /// is listed once, with its entry at the first node that responds.
    ///
    /// # Errors
    /// No node has responded; nothing was changed.
    pub fn stores(&self) -> Result<Vec<Store>, Error> {
        Ok(self.stores_found()?.0)
    }

    /// Lists all stores as [`Pool::stores`] does. Returns also whether all nodes have responded.
    pub(crate) fn stores_found(&self) -> Result<(Vec<Store>, bool), Error> {
        if self.nodes.len() > 1 {
            let listed = self.at_all_nodes(|node| node.stores());
            let is_complete = listed.iter().all(Result::is_ok);
            if listed.iter().all(Result::is_err) {
                return Err(listed.into_iter().find_map(Result::err).expect("a pool has a node"));
            }
            let mut stores: Vec<Store> = Vec::new();
            for store in listed.into_iter().flatten().flatten() {
                let attempt = |store: &Store| store.membership.as_ref().map(|of| of.attempt);
                let is_listed = |other: &Store| attempt(other).is_some() && attempt(other) == attempt(&store);
                if !stores.iter().any(is_listed) {
                    stores.push(store);
                }
            }
            stores.sort_by(|one, other| one.name.cmp(&other.name));
            return Ok((stores, is_complete));
        }
        match self.ask(&Ask::ListStores)? {
            Answer::Stores(stores) => Ok((stores, true)),
            other => Err(unexpected_answer(&other)),
        }
    }

    /// Returns the nodes that hold a store, each as a pool of its own, in the order of the store's members.
    ///
    /// # Errors
    /// The store does not exist, or one of its members is lost or did not respond; nothing was changed.
    pub fn members(&self, name: &str) -> Result<Vec<Pool>, Error> {
        let members =
            self.over_all(async |endpoint| members::open(endpoint, endpoint.nodes(), name).await)?;
        let node = |member: &Member| match &member.store {
            Ok(_) => Ok(Pool::of(vec![self.nodes[member.node.0 as usize].clone()])),
            Err(error) => Err(error.clone().into()),
        };
        members.list().iter().map(node).collect()
    }

    /// Returns how a store's memory is used, summed over the nodes that hold it. Each node walks the store's memory for
    /// it.
    ///
    /// # Errors
    /// The store does not exist, or a node did not respond; nothing was changed.
    pub fn stat(&self, name: &str) -> Result<StoreStat, Error> {
        if self.nodes.len() > 1 {
            let mut sum = StoreStat::default();
            for member in self.members(name)? {
                sum.add(&member.stat(name)?);
            }
            return Ok(sum);
        }
        match self.ask(&Ask::StoreStat { name: name.to_owned() })? {
            Answer::StoreStat(stat) => Ok(stat),
            other => Err(unexpected_answer(&other)),
        }
    }

    /// Returns the node's release, memory, sessions and counters.
    ///
    /// # Errors
    /// The node cannot be reached or did not respond; nothing was changed.
    pub fn info(&self) -> Result<NodeInfo, Error> {
        match self.ask(&Ask::NodeInfo)? {
            Answer::NodeInfo(info) => Ok(info),
            other => Err(unexpected_answer(&other)),
        }
    }

    /// Runs `request` at each node, at the same time.
    fn at_all_nodes<O: Send>(
        &self,
        request: impl Fn(Pool) -> Result<O, Error> + Sync,
    ) -> Vec<Result<O, Error>> {
        std::thread::scope(|scope| {
            let request = &request;
            let asked: Vec<_> = self.nodes().map(|node| scope.spawn(move || request(node))).collect();
            asked.into_iter().map(|asked| asked.join().expect("a request does not panic")).collect()
        })
    }

    /// Runs control requests over sessions with all nodes, to the end.
    pub(crate) fn over_all<O>(
        &self,
        requests: impl AsyncFnOnce(&Rc<Endpoint>) -> Result<O, StoreError>,
    ) -> Result<O, Error> {
        let endpoint = Rc::new(self.endpoint_over_all()?);
        endpoint.set_call_timeout(LONGEST_PATIENCE);
        block_on(&endpoint, requests(&endpoint)).map_err(|error| match error {
            StoreError::Gone(reason) => Error::Fabric(FabricError::Refused(reason)),
            other => other.into(),
        })
    }

    fn ask(&self, ask: &Ask) -> Result<Answer, Error> {
        let endpoint = self.endpoint_here()?;
        endpoint.set_call_timeout(ask.patience());
        let request = serde_json::to_vec(ask).expect("plain data");
        let mut answer = Vec::new();
        block_on(&endpoint, endpoint.call(NodeId(0), ServiceId::NODE, &request, &mut answer))?;
        serde_json::from_slice(&answer).map_err(|error| {
            Error::Fabric(FabricError::Refused(format!(
                "the node's answer is not understood ({error}): use the same release on both sides"
            )))
        })
    }

    /// Starts a node in this process, with `memory` bytes and no store.
    ///
    /// # Errors
    /// The memory cannot be mapped, or a thread cannot be started.
    #[doc(hidden)]
    pub fn serve_here(memory: u64) -> Result<Pool, Error> {
        Ok(Pool::serve_here_at(memory, Vec::new())?.0)
    }

    /// The same, for clients of other processes, too: an engine serves them at each of these addresses. Returns the
    /// addresses' urls, with the actual ports. This process reaches its node without an engine.
    ///
    /// # Errors
    /// The memory cannot be mapped, a thread cannot be started, or an address is in use.
    #[doc(hidden)]
    pub fn serve_here_at(memory: u64, listen: Vec<Listen>) -> Result<(Pool, Vec<String>), Error> {
        let host = host(memory, listen)?;
        let urls = host.listening().iter().map(Listen::to_string).collect();
        let (url, reach) = (format!("local:{memory}"), Reach::Local(Arc::new(host)));
        let node = Node { url, reach, token: None, shared: None, faults: None, refusal: Arc::default() };
        Ok((Pool::of(vec![node]), urls))
    }

    /// The same node, with faults injected into the datagrams of both directions.
    ///
    /// # Errors
    /// The pool's fabric cannot have these faults.
    #[doc(hidden)]
    pub fn with_faults(self, faults: Faults) -> Result<Pool, Error> {
        let node = self.only()?;
        let checked = match node.reach {
            Reach::Udp(_) => faults.check(UdpLine::IS_RELIABLE).map_err(|impossible| impossible.0),
            Reach::Tcp(_) => faults.check(TcpLine::IS_RELIABLE).map_err(|impossible| impossible.0),
            #[cfg(feature = "tls")]
            Reach::Tls(..) => faults.check(TlsLine::IS_RELIABLE).map_err(|impossible| impossible.0),
            _ => Err("faults need a fabric with datagrams: use udp:// or tcp://".into()),
        };
        checked.map_err(|reason| Error::Url(format!("{}: {reason}", node.url)))?;
        let injected = Injected { faults, struck: Arc::default(), carriers: AtomicU64::new(0) };
        Ok(Pool::of(vec![Node { faults: Some(Arc::new(injected)), ..node.clone() }]))
    }

    /// Number of times that each fault has struck so far; `None` if no faults are injected.
    #[doc(hidden)]
    pub fn strikes(&self) -> Option<Strikes> {
        self.nodes.iter().find_map(|node| node.faults.as_ref()).map(|injected| injected.struck.so_far())
    }

    /// Opens a session with the only node, for the calling thread.
    ///
    /// # Errors
    /// As [`connect`]; or the pool has several nodes.
    #[doc(hidden)]
    pub fn endpoint_here(&self) -> Result<Endpoint, Error> {
        self.only()?;
        self.endpoint_over_all()
    }

    /// Opens sessions with all nodes, for the calling thread. Of several nodes, those that cannot be reached now get a
    /// session later.
    ///
    /// # Errors
    /// As [`connect`].
    #[doc(hidden)]
    pub fn endpoint_over_all(&self) -> Result<Endpoint, Error> {
        if let [node] = &*self.nodes {
            return Ok(Endpoint::One(node.session(NodeId(0))?));
        }
        Ok(self.endpoint_that_reopens())
    }

    /// Opens sessions with all nodes, for the calling thread. A session that is over, or cannot be opened now, is
    /// opened later, also that with the only node.
    pub(crate) fn endpoint_that_reopens(&self) -> Endpoint {
        let nodes = Arc::clone(&self.nodes);
        let was_tried: Box<[AtomicBool]> = nodes.iter().map(|_| AtomicBool::new(false)).collect();
        let open = move |id: NodeId| {
            let index = id.0 as usize;
            let is_in_background = was_tried[index].swap(true, Ordering::Relaxed);
            nodes[index].session_or_reason(id, is_in_background)
        };
        Endpoint::Many(Box::new(Nodes::open(self.nodes.len(), Arc::new(open))))
    }
}

/// Starts a node in this process, with `memory` bytes, no store, and an engine at each of these addresses.
fn host(memory: u64, listen: Vec<Listen>) -> Result<Host, Error> {
    let memory = Mapping::create(memory, Pages::Auto)?;
    Ok(Host::start(memory, registry::kinds(), host::Options { listen, ..host::Options::default() })?)
}

impl Node {
    fn new(url: &str, options: &Options) -> Result<Node, Error> {
        if let Some(len) = options.token.as_ref().map(String::len).filter(|&len| len > TOKEN_BYTES_MAX) {
            return Err(Error::Token(format!(
                "the token has {len} bytes, but at most {TOKEN_BYTES_MAX} are allowed: use one made by 'farside token \
                 new'"
            )));
        }
        let token = options.token.as_deref().map(Arc::from);
        let sealing = options.token.as_ref().filter(|_| !options.insecure_udp);
        let shared = sealing.map(|token| Fingerprint::of(token.as_bytes()).shared());
        let (url, reach) = (with_port(url), reach(url, options)?);
        Ok(Node { url, reach, token, shared, faults: None, refusal: Arc::default() })
    }

    fn fabric(&self) -> &'static str {
        match self.reach {
            Reach::Shm(_) => "shm",
            Reach::Local(_) => "local",
            Reach::Udp(_) => "udp",
            Reach::Tcp(_) => "tcp",
            #[cfg(feature = "tls")]
            Reach::Tls(..) => "tls",
            Reach::Ring(_) => "ring",
            #[cfg(feature = "verbs")]
            Reach::Verbs(..) => "verbs",
        }
    }

    /// Opens a session with the node, which the session calls `id`, for the calling thread.
    fn session(&self, id: NodeId) -> Result<Session, Error> {
        let opened = self.dial(id);
        let mut last = self.refusal();
        match &opened {
            Ok(_) => *last = None,
            Err(refused @ Error::Open(_, OpenError::Refused(_))) => {
                let (reason, is_repeated) = (refused.to_string(), last.is_some());
                *last = Some(Refusal { at: Instant::now(), reason, is_repeated });
            }
            Err(_) => {}
        }
        opened
    }

    fn dial(&self, id: NodeId) -> Result<Session, Error> {
        match &self.reach {
            Reach::Shm(path) => Ok(Session::Direct(shm::connect(path, id)?)),
            Reach::Local(host) => {
                let node: Arc<dyn LocalNode> = Arc::clone(host) as _;
                Ok(Session::Direct(local::connect(&node, id)?))
            }
            Reach::Udp(address) => {
                let line = UdpLine::connect(*address, self.shared.clone());
                match &self.faults {
                    None => Ok(Session::Udp(self.dialled(id, line)?)),
                    Some(injected) => Ok(Session::FaultyUdp(self.dialled(id, injected.strike(line))?)),
                }
            }
            Reach::Tcp(address) => {
                let line = TcpLine::connect(*address);
                match &self.faults {
                    None => Ok(Session::Tcp(self.dialled(id, line)?)),
                    Some(injected) => Ok(Session::FaultyTcp(self.dialled(id, injected.strike(line))?)),
                }
            }
            #[cfg(feature = "tls")]
            Reach::Tls(address, name, trust) => {
                let line = TlsLine::connect(*address, name, trust);
                let line = line.map_err(|error| Error::Tls(self.url.clone(), error))?;
                match &self.faults {
                    None => Ok(Session::Tls(self.remote(id, line)?)),
                    Some(injected) => Ok(Session::FaultyTls(self.dialled(id, injected.strike(Ok(line)))?)),
                }
            }
            Reach::Ring(path) => Ok(Session::Ring(self.remote(id, RingLine::connect(path)?)?)),
            #[cfg(feature = "verbs")]
            Reach::Verbs(address, choice) => {
                let line = VerbsLine::connect(*address, choice).map_err(|error| match error {
                    VerbsError::Dial(error) => Error::Open(self.url.clone(), OpenError::Broken(error.into())),
                    VerbsError::Refused(reason) => Error::Open(self.url.clone(), OpenError::Refused(reason)),
                    error => Error::Verbs(self.url.clone(), error),
                })?;
                let opened = verbs::Endpoint::open(line, id, self.session_config());
                let opened = opened.map_err(|error| Error::Open(self.url.clone(), error))?;
                Ok(Session::Verbs(Box::new(opened)))
            }
        }
    }

    /// Opens a session like [`Node::session`]. If the node has refused one lately, to any client of the pool, returns
    /// the reason of that refusal instead.
    fn session_or_reason(&self, id: NodeId, is_in_background: bool) -> Result<Session, String> {
        if let Some(Refusal { at, reason, is_repeated }) = &*self.refusal() {
            let pause = match (is_in_background, is_repeated) {
                (false, _) => REFUSED_NOW,
                (true, false) => REFUSED_PAUSE,
                (true, true) => REFUSED_AGAIN_PAUSE,
            };
            if at.elapsed() < pause {
                return Err(reason.clone());
            }
        }
        self.session(id).map_err(|error| error.to_string())
    }

    fn refusal(&self) -> MutexGuard<'_, Option<Refusal>> {
        self.refusal.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn dialled<L: Line>(&self, id: NodeId, line: std::io::Result<L>) -> Result<Box<Remote<L>>, Error> {
        let broken = |error: std::io::Error| Error::Open(self.url.clone(), OpenError::Broken(error.into()));
        self.remote(id, line.map_err(broken)?)
    }

    fn remote<L: Line>(&self, id: NodeId, line: L) -> Result<Box<Remote<L>>, Error> {
        let opened = Remote::open(line, id, self.session_config());
        opened.map(Box::new).map_err(|error| Error::Open(self.url.clone(), error))
    }

    /// Configuration of a session: a fresh random identity and nonce, and the pool's token.
    fn session_config(&self) -> Config {
        let random = || getrandom::u64().expect("the system has random bytes: nonces must not be guessed");
        let identity = u128::from(random()) << 64 | u128::from(random());
        let token = self.token.as_ref().map_or_else(Vec::new, |token| token.as_bytes().to_vec());
        Config { identity, incarnation: 1, nonce: random(), token, ..Config::default() }
    }
}

impl Injected {
    fn strike<L: Line>(&self, line: std::io::Result<L>) -> std::io::Result<FaultLine<L>> {
        let faults = self.faults.of_carrier(self.carriers.fetch_add(1, Ordering::Relaxed));
        Ok(FaultLine::new(line?, &faults, &self.struck).expect("Pool::with_faults checked the faults"))
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("url", &self.url).finish_non_exhaustive()
    }
}

fn unexpected_answer(answer: &Answer) -> Error {
    Error::Fabric(FabricError::Refused(format!(
        "the node sent an unexpected answer ({answer:?}): use the same release on both sides"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_endpoint_reaches_every_node_of_a_pool() {
        let nodes = [(); 3].map(|()| Pool::serve_here(8 << 20).expect("a node in this process"));
        let pool = Pool::of(nodes.iter().map(|node| node.nodes[0].clone()).collect());
        assert!(pool.endpoint_here().is_err(), "the pool has several nodes");
        let endpoint = pool.endpoint_over_all().expect("sessions");
        assert_eq!(endpoint.nodes(), 3);
        let request = serde_json::to_vec(&Ask::NodeInfo).expect("plain data");
        for (number, node) in (0..).zip(&nodes) {
            let mut answer = Vec::new();
            let call = endpoint.call(NodeId(number), ServiceId::NODE, &request, &mut answer);
            block_on(&endpoint, call).expect("the node responds");
            let Ok(Answer::NodeInfo(found)) = serde_json::from_slice(&answer) else {
                panic!("no information")
            };
            assert_eq!(found.incarnation, node.info().expect("the node responds").incarnation);
        }
        let mut answer = Vec::new();
        let nobody = endpoint.call(NodeId(3), ServiceId::NODE, &request, &mut answer);
        assert_eq!(block_on(&endpoint, nobody), Err(FabricError::NoSuchNode(NodeId(3))));
    }
}
