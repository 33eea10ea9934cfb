//! A node with one store of plain memory, and endpoints to it over the fabric under test.

use farside_fabrics::direct::Direct;
use farside_fabrics::executor::{Turns, block_on};
use farside_fabrics::layer::delay::{Delay, Distance};
use farside_fabrics::local::{self, LocalNode};
use farside_fabrics::memory::{Mapping, Pages};
use farside_fabrics::nodes::{Nodes, Session};
use farside_fabrics::ring::RingLine;
use farside_fabrics::session::carrier::Line;
use farside_fabrics::session::client::Config;
use farside_fabrics::session::endpoint::Endpoint as Remote;
use farside_fabrics::shm;
use farside_fabrics::tcp::TcpLine;
use farside_fabrics::tcp::tls::{HostName, Identity, TlsLine, Trust};
use farside_fabrics::udp::UdpLine;
use farside_fabrics::verbs;
use farside_fabrics::wait::{Waits, Wakeup};
use farside_node::access::{EVERY_STORE, Fingerprint, Grant, Token, Tokens};
use farside_node::host::{Host, Listen, Options};
use farside_remote::Rights;
use farside_remote::arena::session::Counters;
use farside_remote::control::{Answer, Ask, Store};
use farside_remote::fabric::ServiceId;
use farside_remote::service::{Call, Context, Extent, Kind, Plan, Service};
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, Memory, NodeId, Reply};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use tempfile::TempDir;

pub(crate) const NODE: NodeId = NodeId(1);
pub(crate) const QUOTA: u64 = 16 << 20;
const MEMORY: u64 = 40 << 20;
const TABLE: u64 = 1 << 20;

/// Kind of the stores whose creation blocks the node for longer than the time limit of a call.
pub(crate) const SLOW: &str = "slow";
/// Time for which the creation of a [`SLOW`] store blocks the node.
const BUSY: Duration = Duration::from_millis(1800);
pub(crate) const PLAIN: &str = "plain";

/// A client's end of a fabric under test.
pub(crate) trait Endpoint: Fabric + Turns + 'static {
    /// Whether the caller's CPU runs the chains.
    const RUNS_HERE: bool = false;

    /// Drives the endpoint under an executor other than ours. One task must run this future.
    async fn drive(&self);

    /// Returns the number of the session that owns the buffers which chains of this endpoint allocate.
    fn owner(&self) -> u32;
}

impl Endpoint for Direct {
    const RUNS_HERE: bool = true;

    async fn drive(&self) {
        Direct::drive(self).await;
    }

    fn owner(&self) -> u32 {
        self.session().number
    }
}

impl<S: Session + Endpoint> Endpoint for Nodes<S> {
    const RUNS_HERE: bool = S::RUNS_HERE;

    async fn drive(&self) {
        Nodes::drive(self).await;
    }

    fn owner(&self) -> u32 {
        self.session(NODE).expect("the node is reachable").owner()
    }
}

impl<L: Line + 'static> Endpoint for Remote<L> {
    async fn drive(&self) {
        Remote::drive(self).await;
    }

    fn owner(&self) -> u32 {
        1 // Known only to the node, and not visible to chains.
    }
}

impl<E: Endpoint> Endpoint for Delay<Rc<E>> {
    async fn drive(&self) {
        self.inner().drive().await;
    }

    fn owner(&self) -> u32 {
        self.inner().owner()
    }
}

/// A fabric under test, together with its node.
pub(crate) trait Rig: Send + Sync {
    type Endpoint: Endpoint;

    /// Number of swaps, per client, of a word that must not tear. It is high if clients access the memory themselves.
    /// If one engine runs all chains, they never run concurrently, so only the transfer of bytes is tested.
    const SWAPS: u64 = 2_000;

    fn start() -> Self;

    /// Opens another endpoint, for the calling thread.
    fn connect(&self) -> Rc<Self::Endpoint> {
        Rc::new(self.open(NODE))
    }

    /// Opens another endpoint, which calls this node `node`.
    fn open(&self, node: NodeId) -> Self::Endpoint;

    /// Returns the node's memory, for direct inspection.
    fn memory(&self) -> &Mapping;

    /// Returns a flag that is set once the node has begun to create a [`SLOW`] store.
    fn busy(&self) -> &AtomicBool;

    /// Opens another endpoint, and opens or creates the store. If a store's key belongs to one session, the returned
    /// key is that of this endpoint.
    fn client(&self) -> (Rc<Self::Endpoint>, Store) {
        let endpoint = self.connect();
        let ask = |ask: Ask| {
            let mut answer = Vec::new();
            let request = serde_json::to_vec(&ask).expect("plain data");
            let called = endpoint.call(NODE, ServiceId::NODE, &request, &mut answer);
            block_on(&*endpoint, called).map(|()| serde_json::from_slice(&answer).expect("an answer"))
        };
        let (name, kind, parameters) = ("store".to_owned(), PLAIN.to_owned(), String::new());
        let answer = ask(Ask::OpenStore { name: name.clone() })
            .or_else(|_| ask(Ask::CreateStore { name, kind, parameters, quota: QUOTA }));
        match answer {
            Ok(Answer::Store(store)) => (endpoint, store),
            other => panic!("requested a store, got {other:?}"),
        }
    }
}

/// The in-process fabric, with its node.
pub(crate) struct Local {
    host: Arc<Host>,
    busy: Arc<AtomicBool>,
}

impl Rig for Local {
    type Endpoint = Direct;

    const SWAPS: u64 = 200_000;

    fn start() -> Local {
        let busy = Arc::default();
        Local { host: Arc::new(host(Options::default(), &busy)), busy }
    }

    fn open(&self, id: NodeId) -> Direct {
        let node: Arc<dyn LocalNode> = Arc::clone(&self.host) as _;
        local::connect(&node, id).expect("a session")
    }

    fn memory(&self) -> &Mapping {
        self.host.memory()
    }

    fn busy(&self) -> &AtomicBool {
        &self.busy
    }
}

/// The shared-memory fabric: the client connects to the node's socket, and has its own mapping of the memory.
pub(crate) struct Shm {
    host: Host,
    busy: Arc<AtomicBool>,
    folder: TempDir,
}

const SOCKET: &str = "node.sock";

impl Rig for Shm {
    type Endpoint = Direct;

    const SWAPS: u64 = 200_000;

    fn start() -> Shm {
        let folder = tempfile::tempdir().expect("a folder");
        let busy = Arc::default();
        let socket = Some(folder.path().join(SOCKET));
        Shm { host: host(Options { socket, ..Options::default() }, &busy), busy, folder }
    }

    fn open(&self, node: NodeId) -> Direct {
        let path = self.folder.path().join(SOCKET);
        let endpoint = shm::connect(&path, node).unwrap_or_else(|error| panic!("{error}"));
        let (own, theirs): (*const Mapping, *const Mapping) = (&**endpoint.memory(), &**self.host.memory());
        assert!(!std::ptr::eq(own, theirs), "a client has its own mapping");
        endpoint
    }

    fn memory(&self) -> &Mapping {
        self.host.memory()
    }

    fn busy(&self) -> &AtomicBool {
        &self.busy
    }
}

/// A fabric whose chains run at an engine, with its node.
pub(crate) struct Engine<C> {
    host: Host,
    busy: Arc<AtomicBool>,
    carrier: PhantomData<C>,
}

/// The carrier between clients and an engine.
pub(crate) trait Carrier: Send + Sync + 'static {
    type Line: Line + Send + 'static;

    /// Token of every client; empty if the node requires none.
    const TOKEN: &[u8] = b"";

    fn listen() -> Listen;

    fn line(listen: &Listen) -> Self::Line;
}

const LOOPBACK: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Carrier over UDP in the clear.
pub(crate) struct Udp;

impl Carrier for Udp {
    type Line = UdpLine;

    fn listen() -> Listen {
        Listen::Udp(LOOPBACK)
    }

    fn line(listen: &Listen) -> UdpLine {
        let Listen::Udp(address) = listen else { panic!("wrong listener {listen}") };
        UdpLine::connect(*address, None).expect("a socket")
    }
}

/// Carrier over UDP with datagrams sealed by a token.
pub(crate) struct SealedUdp;

impl Carrier for SealedUdp {
    type Line = UdpLine;

    const TOKEN: &[u8] = b"of the conformance suite";

    fn listen() -> Listen {
        Udp::listen()
    }

    fn line(listen: &Listen) -> UdpLine {
        let Listen::Udp(address) = listen else { panic!("wrong listener {listen}") };
        UdpLine::connect(*address, Some(Fingerprint::of(Self::TOKEN).shared())).expect("a socket")
    }
}

/// Carrier over TCP.
pub(crate) struct Tcp;

impl Carrier for Tcp {
    type Line = TcpLine;

    fn listen() -> Listen {
        Listen::Tcp(LOOPBACK)
    }

    fn line(listen: &Listen) -> TcpLine {
        let Listen::Tcp(address) = listen else { panic!("wrong listener {listen}") };
        TcpLine::connect(*address).expect("a connection")
    }
}

/// Carrier over TLS.
pub(crate) struct Tls;

/// The certificate that nodes present and clients trust.
static CERTIFICATE: LazyLock<(Identity, Trust)> = LazyLock::new(|| {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).expect("a certificate");
    let (shown, key) = (made.cert.pem(), made.signing_key.serialize_pem());
    let identity = Identity::from_pem(shown.as_bytes(), key.as_bytes()).expect("an identity");
    (identity, Trust::from_pem(shown.as_bytes()).expect("certificates"))
});

impl Carrier for Tls {
    type Line = TlsLine;

    fn listen() -> Listen {
        Listen::Tls(LOOPBACK, CERTIFICATE.0.clone())
    }

    fn line(listen: &Listen) -> TlsLine {
        let Listen::Tls(address, _) = listen else { panic!("wrong listener {listen}") };
        let name = HostName::parse("127.0.0.1").expect("an address");
        TlsLine::connect(*address, &name, &CERTIFICATE.1).unwrap_or_else(|error| panic!("{error}"))
    }
}

/// Carrier over rings in shared memory.
pub(crate) struct Rings;

impl Carrier for Rings {
    type Line = RingLine;

    fn listen() -> Listen {
        static NODES: AtomicU64 = AtomicU64::new(0);
        let number = NODES.fetch_add(1, Ordering::Relaxed);
        // A node removes its socket when it ends.
        let name = format!("farside-conformance-{}-{number}.ring", std::process::id());
        Listen::Ring(std::env::temp_dir().join(name))
    }

    fn line(listen: &Listen) -> RingLine {
        let Listen::Ring(path) = listen else { panic!("wrong listener {listen}") };
        RingLine::connect(path).unwrap_or_else(|error| panic!("{error}"))
    }
}

impl<C: Carrier> Rig for Engine<C> {
    type Endpoint = Remote<C::Line>;

    fn start() -> Engine<C> {
        let busy = Arc::default();
        let tokens = (!C::TOKEN.is_empty()).then(|| {
            let stores = BTreeMap::from([(EVERY_STORE.to_owned(), Grant(Rights::ALL))]);
            let token = Token { name: "all".into(), sha256: Fingerprint::of(C::TOKEN), admin: true, stores };
            Tokens { token: vec![token] }
        });
        let options = Options { listen: vec![C::listen()], tokens, ..Options::default() };
        Engine { host: host(options, &busy), busy, carrier: PhantomData }
    }

    fn open(&self, node: NodeId) -> Remote<C::Line> {
        let line = C::line(&self.host.listening()[0]);
        Remote::open(line, node, config(C::TOKEN)).unwrap_or_else(|error| panic!("{error}"))
    }

    fn memory(&self) -> &Mapping {
        self.host.memory()
    }

    fn busy(&self) -> &AtomicBool {
        &self.busy
    }
}

/// Returns the configuration of another client with this token.
fn config(token: &[u8]) -> Config {
    static CLIENTS: AtomicU64 = AtomicU64::new(0);
    let identity = CLIENTS.fetch_add(1, Ordering::Relaxed).into();
    Config { identity, incarnation: 1, nonce: 7, token: token.to_vec(), ..Config::default() }
}

/// The fabric over an RDMA device, with its node.
pub(crate) struct Device {
    host: Host,
    busy: Arc<AtomicBool>,
}

impl Rig for Device {
    type Endpoint = verbs::Endpoint;

    fn start() -> Device {
        let busy = Arc::default();
        let device = std::env::var("FARSIDE_VERBS_DEVICE").expect("`cargo xtask verbs` names the device");
        let at = verbs::VerbsAddress::parse(&format!("{device}:0?host=127.0.0.1")).expect("an address");
        let options = Options { listen: vec![Listen::Verbs(at)], ..Options::default() };
        Device { host: host(options, &busy), busy }
    }

    fn open(&self, node: NodeId) -> verbs::Endpoint {
        let url = self.host.listening()[0].to_string();
        let at = url.strip_prefix("verbs://").and_then(|at| at.parse().ok()).expect("an address");
        let line = verbs::VerbsLine::connect(at, &verbs::Choice::default());
        let line = line.unwrap_or_else(|error| panic!("{error}"));
        verbs::Endpoint::open(line, node, config(b"")).unwrap_or_else(|error| panic!("{error}"))
    }

    fn memory(&self) -> &Mapping {
        self.host.memory()
    }

    fn busy(&self) -> &AtomicBool {
        &self.busy
    }
}

impl Endpoint for verbs::Endpoint {
    async fn drive(&self) {
        Session::drive(self).await;
    }

    fn owner(&self) -> u32 {
        1 // Known only to the node, and not visible to chains.
    }
}

/// Another fabric, with latency added by the delay layer.
pub(crate) struct Far<R>(R);

impl<R: Rig> Rig for Far<R> {
    type Endpoint = Delay<Rc<R::Endpoint>>;

    // There are fewer swaps than without latency, since each one waits for a round trip.
    const SWAPS: u64 = if R::Endpoint::RUNS_HERE { 20_000 } else { R::SWAPS };

    fn start() -> Far<R> {
        Far(R::start())
    }

    fn open(&self, node: NodeId) -> Delay<Rc<R::Endpoint>> {
        let us = Duration::from_micros;
        let distance = Distance { one_way: us(12), jitter: us(150), bytes_per_s: Some(1 << 30), seed: 1 };
        let endpoint = Rc::new(self.0.open(node));
        match R::Endpoint::RUNS_HERE {
            true => Delay::of_requests(endpoint, distance),
            false => Delay::of_answers(endpoint, distance),
        }
    }

    fn memory(&self) -> &Mapping {
        self.0.memory()
    }

    fn busy(&self) -> &AtomicBool {
        self.0.busy()
    }
}

/// A pool of three nodes. Its middle node has the store.
pub(crate) struct Three<R>(Arc<[R; 3]>);

impl<R: Rig<Endpoint: Session> + Send + 'static> Rig for Three<R> {
    type Endpoint = Nodes<R::Endpoint>;

    const SWAPS: u64 = R::SWAPS;

    fn start() -> Three<R> {
        Three(Arc::new([R::start(), R::start(), R::start()]))
    }

    fn open(&self, _: NodeId) -> Nodes<R::Endpoint> {
        let rigs = Arc::clone(&self.0);
        Nodes::open(3, Arc::new(move |node| Ok(rigs[node.0 as usize].open(node))))
    }

    fn memory(&self) -> &Mapping {
        self.0[NODE.0 as usize].memory()
    }

    fn busy(&self) -> &AtomicBool {
        self.0[NODE.0 as usize].busy()
    }
}

/// A pool of three nodes over three fabrics. `STORE` is the number of the fabric, in the order of [`Over`], to the node
/// that has the store.
pub(crate) struct Mixed<const STORE: u32> {
    shm: Arc<Shm>,
    tcp: Arc<Engine<Tcp>>,
    rings: Arc<Engine<Rings>>,
}

/// A session over one of three fabrics.
pub(crate) enum Over<const STORE: u32> {
    Shm(Direct),
    Tcp(Remote<TcpLine>),
    Ring(Remote<RingLine>),
}

/// Number of the fabric to a node of the pool.
const fn fabric_of(node: NodeId, store: u32) -> u32 {
    (node.0 + store + 3 - NODE.0) % 3
}

/// Evaluates `$then` for the fabric of a session, with `$inner` bound to the session over it.
macro_rules! over {
    ($session:expr, $inner:ident => $then:expr) => {
        match $session {
            Over::Shm($inner) => $then,
            Over::Tcp($inner) => $then,
            Over::Ring($inner) => $then,
        }
    };
}

impl<const STORE: u32> Fabric for Over<STORE> {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        over!(self, inner => inner.run(node, chain, reply).await)
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        over!(self, inner => inner.call(node, service, request, answer).await)
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        over!(self, inner => inner.retire(node, key, buffer));
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        over!(self, inner => inner.capabilities(node))
    }
}

impl<const STORE: u32> Turns for Over<STORE> {
    fn end_turn(&self) {
        over!(self, inner => inner.end_turn());
    }
}

impl<const STORE: u32> Waits for Over<STORE> {
    fn begin_wait(&self) {
        over!(self, inner => inner.begin_wait());
    }

    fn is_waiting(&self) -> bool {
        over!(self, inner => inner.is_waiting())
    }

    fn poll(&self) -> bool {
        over!(self, inner => inner.poll())
    }

    fn end_wait(&self, wakeup: Wakeup) {
        over!(self, inner => inner.end_wait(wakeup));
    }

    fn may_sleep(&self) -> bool {
        over!(self, inner => inner.may_sleep())
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        over!(self, inner => inner.fd())
    }

    fn sleep_max(&self, now: Duration) -> Option<Duration> {
        over!(self, inner => inner.sleep_max(now))
    }
}

impl<const STORE: u32> Session for Over<STORE> {
    fn is_over(&self) -> bool {
        over!(self, inner => inner.is_over())
    }

    fn set_call_timeout(&self, patience: Duration) {
        over!(self, inner => inner.set_call_timeout(patience));
    }

    fn counters(&self) -> Counters {
        over!(self, inner => inner.counters())
    }

    async fn drive(&self) {
        over!(self, inner => inner.drive().await);
    }
}

impl<const STORE: u32> Endpoint for Over<STORE> {
    const RUNS_HERE: bool = STORE == 0;

    async fn drive(&self) {
        over!(self, inner => inner.drive().await);
    }

    fn owner(&self) -> u32 {
        over!(self, inner => inner.owner())
    }
}

impl<const STORE: u32> Rig for Mixed<STORE> {
    type Endpoint = Nodes<Over<STORE>>;

    fn start() -> Mixed<STORE> {
        Mixed {
            shm: Arc::new(Shm::start()),
            tcp: Arc::new(Engine::start()),
            rings: Arc::new(Engine::start()),
        }
    }

    fn open(&self, _: NodeId) -> Nodes<Over<STORE>> {
        let (shm, tcp, rings) = (Arc::clone(&self.shm), Arc::clone(&self.tcp), Arc::clone(&self.rings));
        Nodes::open(
            3,
            Arc::new(move |node| {
                Ok(match fabric_of(node, STORE) {
                    0 => Over::Shm(shm.open(node)),
                    1 => Over::Tcp(tcp.open(node)),
                    _ => Over::Ring(rings.open(node)),
                })
            }),
        )
    }

    fn memory(&self) -> &Mapping {
        match fabric_of(NODE, STORE) {
            0 => self.shm.memory(),
            1 => self.tcp.memory(),
            _ => self.rings.memory(),
        }
    }

    fn busy(&self) -> &AtomicBool {
        match fabric_of(NODE, STORE) {
            0 => self.shm.busy(),
            1 => self.tcp.busy(),
            _ => self.rings.busy(),
        }
    }
}

fn host(options: Options, busy: &Arc<AtomicBool>) -> Host {
    let memory = Mapping::create(MEMORY, Pages::Small).expect("memory");
    let kinds: Vec<Box<dyn Kind<Mapping>>> = vec![
        Box::new(Plain { name: PLAIN, busy: None }),
        Box::new(Plain { name: SLOW, busy: Some(Arc::clone(busy)) }),
    ];
    Host::start(memory, kinds, options).expect("a node")
}

/// A store with a table of 1 MiB and buffers, used only by the test's chains.
struct Plain {
    name: &'static str,
    busy: Option<Arc<AtomicBool>>,
}

impl<M: Memory> Kind<M> for Plain {
    fn name(&self) -> &'static str {
        self.name
    }

    fn plan(&self, _parameters: &str, _quota: u64, _entropy: u64) -> Result<Plan, String> {
        if let Some(busy) = &self.busy {
            busy.store(true, Ordering::Release);
            std::thread::sleep(BUSY);
        }
        Ok(Plan { table_len: TABLE, ..Plan::default() })
    }

    fn serve(&self, _parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Ok(Box::new(Adder { table }))
    }
}

/// A service that adds the size of each request to the table's last word, and responds with the sum and the request.
struct Adder {
    table: Extent,
}

impl<M: Memory> Service<M> for Adder {
    fn call(
        &self,
        Context { memory, .. }: Context<'_, M>,
        call: Call<'_>,
        answer: &mut Vec<u8>,
    ) -> Result<Result<(), String>, M::Wait> {
        if !call.rights.contains(Rights::WRITE) || call.request.is_empty() {
            return Ok(Err("the request is empty, or the key may not write".into()));
        }
        let (at, mut sum) = (self.table.at + self.table.len - 8, [0; 8]);
        memory.read(at, &mut sum)?;
        let sum = u64::from_le_bytes(sum) + call.request.len() as u64;
        // The addition takes two steps, so that concurrent calls would lose one.
        memory.write(at, &sum.to_le_bytes())?;
        answer.extend_from_slice(&sum.to_le_bytes());
        answer.extend_from_slice(&call.request[8.min(call.request.len())..]);
        Ok(Ok(()))
    }

    fn live(&self, _memory: &M, _cursor: u64, _found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        Ok(None)
    }
}
