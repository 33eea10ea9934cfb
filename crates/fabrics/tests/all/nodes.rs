//! A pool of nodes as nodes come and go: only requests to a lost node fail, at once, and a node that returns is used
//! again.

use farside_fabrics::direct::Direct;
use farside_fabrics::executor::{Core, block_on};
use farside_fabrics::memory::{Mapping, Pages};
use farside_fabrics::nodes::{Nodes, Open, Session};
use farside_fabrics::session::client::Config;
use farside_fabrics::session::endpoint::Endpoint;
use farside_fabrics::shm;
use farside_fabrics::tcp::TcpLine;
use farside_fabrics::timer;
use farside_fabrics::udp::UdpLine;
use farside_node::host::{Host, Listen, Options};
use farside_remote::control::{Answer, Ask};
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::{Fabric, FabricError, NodeId};
use rustix::time::{ClockId, clock_gettime};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const MEMORY: u64 = 8 << 20;
const NODES: usize = 3;
/// Maximum duration of a request to a node that is known to be lost.
const KNOWN_LOST: Duration = Duration::from_millis(10);
/// Maximum time until a node that has returned is used again.
const RETURN: Duration = Duration::from_secs(1);
const LOOPBACK: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// A way to start a node and to reach it.
trait Way: Send + Sync + 'static {
    type Session: Session;

    /// Place at which the node with this number is found.
    type Place: Send + Sync;

    /// Starts a node, at `place` if given.
    fn start(place: Option<&Self::Place>) -> (Host, Self::Place);

    fn connect(place: &Self::Place, node: NodeId) -> Result<Self::Session, String>;
}

fn started(options: Options) -> Host {
    Host::start(Mapping::create(MEMORY, Pages::Small).expect("memory"), Vec::new(), options).expect("a node")
}

fn config() -> Config {
    static CLIENTS: AtomicU64 = AtomicU64::new(1 << 32);
    let identity = CLIENTS.fetch_add(1, Ordering::Relaxed);
    Config { identity: identity.into(), incarnation: 1, nonce: identity, ..Config::default() }
}

struct Shm;

impl Way for Shm {
    type Session = Direct;
    type Place = PathBuf;

    fn start(place: Option<&PathBuf>) -> (Host, PathBuf) {
        static SOCKETS: AtomicU64 = AtomicU64::new(0);
        let number = SOCKETS.fetch_add(1, Ordering::Relaxed);
        let fresh =
            || std::env::temp_dir().join(format!("farside-nodes-{}-{number}.sock", std::process::id()));
        let socket = place.cloned().unwrap_or_else(fresh);
        (started(Options { socket: Some(socket.clone()), ..Options::default() }), socket)
    }

    fn connect(place: &PathBuf, node: NodeId) -> Result<Direct, String> {
        shm::connect(place, node).map_err(|error| error.to_string())
    }
}

struct Udp;

impl Way for Udp {
    type Session = Endpoint<UdpLine>;
    type Place = SocketAddr;

    fn start(place: Option<&SocketAddr>) -> (Host, SocketAddr) {
        let listen = vec![Listen::Udp(place.copied().unwrap_or(LOOPBACK))];
        let host = started(Options { listen, ..Options::default() });
        let Listen::Udp(address) = host.listening()[0] else { panic!("it listens on UDP") };
        (host, address)
    }

    fn connect(place: &SocketAddr, node: NodeId) -> Result<Endpoint<UdpLine>, String> {
        let line = UdpLine::connect(*place, None).map_err(|error| error.to_string())?;
        Endpoint::open(line, node, config()).map_err(|error| error.to_string())
    }
}

struct Tcp;

impl Way for Tcp {
    type Session = Endpoint<TcpLine>;
    type Place = SocketAddr;

    fn start(place: Option<&SocketAddr>) -> (Host, SocketAddr) {
        let listen = vec![Listen::Tcp(place.copied().unwrap_or(LOOPBACK))];
        let host = started(Options { listen, ..Options::default() });
        let Listen::Tcp(address) = host.listening()[0] else { panic!("it listens on TCP") };
        (host, address)
    }

    fn connect(place: &SocketAddr, node: NodeId) -> Result<Endpoint<TcpLine>, String> {
        let line = TcpLine::connect(*place).map_err(|error| error.to_string())?;
        Endpoint::open(line, node, config()).map_err(|error| error.to_string())
    }
}

/// Three nodes, each of which can be stopped and started again at its place.
struct Pool<W: Way> {
    hosts: Vec<Option<Host>>,
    places: Arc<Vec<W::Place>>,
    attempts: Arc<AtomicU64>,
}

impl<W: Way> Pool<W> {
    fn start() -> Pool<W> {
        let (hosts, places) =
            (0..NODES).map(|_| W::start(None)).map(|(host, place)| (Some(host), place)).unzip();
        Pool { hosts, places: Arc::new(places), attempts: Arc::default() }
    }

    fn client(&self) -> Nodes<W::Session> {
        let (places, attempts) = (Arc::clone(&self.places), Arc::clone(&self.attempts));
        let open: Arc<Open<W::Session>> = Arc::new(move |node| {
            attempts.fetch_add(1, Ordering::Relaxed);
            W::connect(&places[node.0 as usize], node)
        });
        Nodes::open(NODES, open)
    }

    fn stop(&mut self, node: usize) {
        drop(self.hosts[node].take().expect("the node runs"));
    }

    fn restart(&mut self, node: usize) {
        self.hosts[node] = Some(W::start(Some(&self.places[node])).0);
    }
}

/// Calls a node, which returns its memory's size.
async fn ask<S: Session>(client: &Nodes<S>, node: usize) -> Result<(), FabricError> {
    let request = serde_json::to_vec(&Ask::NodeInfo).expect("plain data");
    let mut answer = Vec::new();
    client.call(NodeId(node as u32), ServiceId::NODE, &request, &mut answer).await?;
    assert!(matches!(serde_json::from_slice(&answer), Ok(Answer::NodeInfo(_))));
    Ok(())
}

#[test]
fn a_lost_node_fails_at_once_and_returns_alone() {
    fn check<W: Way>() {
        let mut pool = Pool::<W>::start();
        let client = pool.client();
        let all = || (0..NODES).map(|node| block_on(&client, ask(&client, node)).is_ok()).collect::<Vec<_>>();
        assert_eq!(all(), [true; NODES]);
        pool.stop(1);
        // The first request may only now find out that the node is lost.
        let error = block_on(&client, ask(&client, 1)).expect_err("the node is lost");
        assert!(!matches!(error, FabricError::Deadline { .. }), "{error}");
        for _ in 0..50 {
            let since = Instant::now();
            let error = block_on(&client, ask(&client, 1)).expect_err("the node is lost");
            let took = since.elapsed();
            assert!(took < KNOWN_LOST, "{took:?}: {error}");
            assert_eq!(error.ran(), Ran::No, "{error}");
            assert!(error.to_string().contains("node 1 "), "{error}");
            block_on(&client, ask(&client, 0)).expect("the node lives");
            block_on(&client, ask(&client, 2)).expect("the node lives");
        }
        pool.restart(1);
        let since = Instant::now();
        while block_on(&client, ask(&client, 1)).is_err() {
            assert!(since.elapsed() < RETURN, "the node has returned and is not used");
            block_on(&client, timer::sleep(Duration::from_millis(1)));
        }
        assert_eq!(
            (0..NODES).map(|node| client.session_number(NodeId(node as u32))).collect::<Vec<_>>(),
            [1, 2, 1]
        );
        assert_eq!(all(), [true; NODES]);
    }
    check::<Shm>();
    check::<Udp>();
    check::<Tcp>();
}

#[test]
fn requests_in_flight_to_other_nodes_survive_a_loss() {
    fn check<W: Way>() {
        let mut pool = Pool::<W>::start();
        let client = pool.client();
        let (counts, until) =
            ([const { AtomicU64::new(0) }; NODES], Instant::now() + Duration::from_millis(400));
        let lost = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(100));
                pool.stop(2);
            });
            let mut core = Core::new(&client);
            for task in 0..4 * NODES {
                let (client, counts, lost, node) = (&client, &counts, &lost, task % NODES);
                core.spawn(async move {
                    while Instant::now() < until {
                        match ask(client, node).await {
                            Ok(()) => drop(counts[node].fetch_add(1, Ordering::Relaxed)),
                            Err(error) => {
                                lost.lock().expect("no panic").push((node, error));
                                timer::sleep(Duration::from_millis(1)).await;
                            }
                        }
                    }
                });
            }
            core.run();
        });
        let lost = lost.into_inner().expect("no panic");
        assert!(!lost.is_empty() && lost.iter().all(|&(node, _)| node == 2), "{lost:?}");
        assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) > 10), "{counts:?}");
    }
    check::<Udp>();
    check::<Tcp>();
}

#[test]
fn a_node_that_is_missing_at_first_joins_later() {
    let mut pool = Pool::<Tcp>::start();
    pool.stop(0);
    let client = pool.client();
    assert_eq!(client.session_number(NodeId(0)), 0);
    let error = block_on(&client, ask(&client, 0)).expect_err("the node is missing");
    assert!(matches!(error, FabricError::Unreachable { node: NodeId(0), .. }), "{error:?}");
    block_on(&client, ask(&client, 1)).expect("the node lives");
    pool.restart(0);
    let since = Instant::now();
    while block_on(&client, ask(&client, 0)).is_err() {
        assert!(since.elapsed() < RETURN, "the node is there and is not used");
        block_on(&client, timer::sleep(Duration::from_millis(1)));
    }
    assert_eq!(client.session_number(NodeId(0)), 1);
}

#[test]
fn a_pool_that_is_dropped_opens_no_more_sessions() {
    let mut pool = Pool::<Tcp>::start();
    let client = pool.client();
    pool.stop(1);
    block_on(&client, ask(&client, 1)).expect_err("the node is lost");
    drop(client);
    // The thread's last attempt may be under way.
    std::thread::sleep(Duration::from_millis(50));
    let attempts = pool.attempts.load(Ordering::Relaxed);
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(pool.attempts.load(Ordering::Relaxed), attempts);
}

#[test]
fn a_pool_with_a_lost_node_idles_cheaply_and_tries_rarely() {
    let mut pool = Pool::<Udp>::start();
    let client = pool.client();
    pool.stop(1);
    block_on(&client, ask(&client, 1)).expect_err("the node is lost");
    let cpu = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).expect("a time");
    let (before, attempts) = (cpu(), pool.attempts.load(Ordering::Relaxed));
    block_on(&client, timer::sleep(Duration::from_secs(1)));
    let (used, attempts) = (cpu() - before, pool.attempts.load(Ordering::Relaxed) - attempts);
    assert!(used < Duration::from_millis(100), "{used:?} of a second");
    assert!((2..=20).contains(&attempts), "{attempts} attempts in a second");
    block_on(&client, ask(&client, 0)).expect("the node lives");
}
