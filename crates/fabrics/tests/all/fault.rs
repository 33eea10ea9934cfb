//! Tests of faults on real carriers, at the client's end and at the engine's. The carriers run over real sockets, and a
//! server records the requests that it runs.
//!
//! Invariant: each configured fault has struck.
//! Invariant: each answered request has run once.

use farside_fabrics::executor::{Core, block_on};
use farside_fabrics::layer::fault::{FaultLine, FaultPort, Faults, Strikes, Struck};
use farside_fabrics::session::answer;
use farside_fabrics::session::carrier::{Arrival, Line, Port};
use farside_fabrics::session::client;
use farside_fabrics::session::endpoint::Endpoint;
use farside_fabrics::session::server::{Config, End, Hello, Host, Outcome, Request, RequestRef, Server};
use farside_fabrics::tcp::{TcpLine, TcpPort};
use farside_fabrics::timer;
use farside_fabrics::udp::seal::Shared;
use farside_fabrics::udp::{UdpLine, UdpPort};
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::{Fabric, FabricError, NodeId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const NODE: NodeId = NodeId(0);
const LOOPBACK: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
const TASKS: u64 = 16;
const CALLS: u64 = 500;

/// Records how often each request ran.
#[derive(Default)]
struct Book {
    ran: BTreeMap<u64, u64>,
    secrets: u64,
    broken: u64,
}

impl Host for Book {
    type Session = ();

    fn secret(&mut self) -> u64 {
        self.secrets += 1;
        self.secrets
    }

    fn open(&mut self, _hello: &Hello<'_>) -> Result<(), String> {
        Ok(())
    }

    fn run(&mut self, (): &mut (), _at: RequestRef, request: Request<'_>, reply: &mut Vec<u8>) -> Outcome {
        let Request::Call(_, bytes) = request else { panic!("only calls are made") };
        let number = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
        *self.ran.entry(number).or_default() += 1;
        answer::put_body(reply, bytes);
        Outcome::Done
    }

    fn close(&mut self, (): (), end: End) {
        self.broken += u64::from(end == End::Broken);
    }
}

/// Time limit of a server, so that a failing test ends.
const PATIENCE: Duration = Duration::from_secs(60);

/// Serves until `stop` is set; sleeps on the port, as engines do.
fn serve<P: Port>(mut port: P, stop: &AtomicBool) -> Book {
    let config = Config { datagram: port.datagram_max(), is_reliable: P::IS_RELIABLE, ..Config::default() };
    let (mut server, mut book, mut out) =
        (Server::<P::Address, Book>::new(config), Book::default(), Vec::new());
    let until = timer::now() + PATIENCE;
    while !stop.load(Ordering::Relaxed) {
        let now = timer::now();
        assert!(now < until, "the clients are done by now");
        let received = port.receive(|from, arrival| match arrival {
            Arrival::Datagram(bytes) => {
                let _refused_is_counted = server.receive(now, from, bytes, &mut book);
            }
            Arrival::HungUp => server.hang_up(from, &mut book),
            Arrival::Outsider(..) => panic!("the carrier rejected a greeting"),
        });
        if received.expect("a working carrier") {
            while let Some(to) = server.transmit(&mut out) {
                port.send(to, &out);
            }
            port.flush();
        } else if port.may_sleep() {
            let most = Duration::from_millis(100);
            let wait = port.sleep_max().map_or(most, |wait| wait.min(most));
            let wait = Timespec { tv_sec: 0, tv_nsec: wait.subsec_nanos().into() };
            let _looked_at_anyway =
                poll(&mut [PollFd::from_borrowed_fd(port.fd(), PollFlags::IN)], Some(&wait));
        }
    }
    book
}

/// Outcome of the calls of many tasks: which requests ran, which were answered, which failed, and the faults that
/// struck at the client's end and at the engine's.
struct Story {
    book: Book,
    answered: Vec<u64>,
    failed: Vec<(u64, Ran)>,
    strikes: [Strikes; 2],
}

fn story<L: Line, P: Port<Address: Send>>(
    port: P,
    line: impl FnOnce() -> L + Send,
    at_client: &Faults,
    at_engine: &Faults,
) -> Story {
    let struck: [Arc<Struck>; 2] = Default::default();
    let port = FaultPort::new(port, at_engine, &struck[1]).expect("valid faults");
    let stop = AtomicBool::new(false);
    let (answered, failed, book) = std::thread::scope(|scope| {
        let serving = scope.spawn(|| serve(port, &stop));
        let (answered, failed) = ask(FaultLine::new(line(), at_client, &struck[0]).expect("valid faults"));
        stop.store(true, Ordering::Relaxed);
        (answered, failed, serving.join().expect("the server does not panic"))
    });
    let strikes = struck.map(|struck| struck.so_far());
    println!(
        "{} answered, {} failed; at the client: {}; at the engine: {}",
        answered.len(),
        failed.len(),
        strikes[0],
        strikes[1]
    );
    for number in &answered {
        assert_eq!(book.ran.get(number), Some(&1), "request {number} was answered");
    }
    for (number, ran) in &failed {
        let times = book.ran.get(number).copied().unwrap_or(0);
        let as_said = match ran {
            Ran::Yes => times == 1,
            Ran::No => times == 0,
            Ran::Unknown => times <= 1,
        };
        assert!(as_said, "request {number} ran {times} times, but was reported as {ran:?}");
    }
    Story { book, answered, failed, strikes }
}

fn ask<L: Line>(line: L) -> (Vec<u64>, Vec<(u64, Ran)>) {
    let config = client::Config { identity: 1, incarnation: 1, nonce: 7, ..client::Config::default() };
    let endpoint = Endpoint::open(line, NODE, config).expect("a session");
    let (answered, failed) = (RefCell::new(Vec::new()), RefCell::new(Vec::new()));
    let is_over = Cell::new(false);
    let mut core = Core::new(&endpoint);
    for task in 0..TASKS {
        let (endpoint, answered, failed, is_over) = (&endpoint, &answered, &failed, &is_over);
        core.spawn(async move {
            let mut answer = Vec::new();
            for call in 0..CALLS {
                if is_over.get() {
                    break;
                }
                let number = task * CALLS + call;
                // One request in fifty takes several datagrams in each direction.
                let size = if call % 50 == 0 { 40_000 } else { 8 };
                let mut request = number.to_le_bytes().to_vec();
                request.resize(size, task as u8);
                match endpoint.call(NODE, ServiceId(1), &request, &mut answer).await {
                    Ok(()) => {
                        assert!(answer == request, "the response repeats the request");
                        answered.borrow_mut().push(number);
                    }
                    Err(error) => {
                        is_over.set(matches!(error, FabricError::Lost { .. }));
                        failed.borrow_mut().push((number, error.ran()));
                    }
                }
            }
        });
    }
    core.run();
    drop(core);
    (answered.into_inner(), failed.into_inner())
}

fn faults(seed: u64) -> Faults {
    Faults { seed, ..Faults::default() }
}

#[test]
fn over_udp_every_call_is_answered_despite_faults_at_either_end() {
    let lossy = |seed| Faults { loss: 0.02, duplicate: 0.02, reorder: 0.02, delay: 0.01, ..faults(seed) };
    for shared in [None, Some(shared())] {
        let (port, at) = port_at(LOOPBACK, shared.clone());
        let outcome = story(port, || UdpLine::connect(at, shared).expect("a socket"), &lossy(1), &lossy(2));
        assert_eq!((outcome.answered.len() as u64, outcome.failed.len()), (TASKS * CALLS, 0));
        for strikes in outcome.strikes {
            let Strikes { lost, duplicated, reordered, delayed, .. } = strikes;
            assert!([lost, duplicated, reordered, delayed].iter().all(|&count| count > 0), "{strikes}");
        }
    }
}

/// Returns the secret that both ends use if datagrams are sealed.
fn shared() -> Shared {
    Shared::new([7; 32])
}

fn port_at(address: SocketAddr, shared: Option<Shared>) -> (UdpPort, SocketAddr) {
    let mut port = UdpPort::bind(address, 1).expect("a socket").pop().expect("one port");
    if let Some(shared) = shared {
        port =
            port.sealed_by(Box::new(move |name| Some(shared.clone()).filter(|shared| shared.name() == name)));
    }
    let at = port.address().expect("a bound address");
    (port, at)
}

#[test]
fn a_restarted_node_reports_it_to_clients_with_old_seals() {
    let (port, at) = port_at(LOOPBACK, Some(shared()));
    let stops = [const { AtomicBool::new(false) }; 2];
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| serve(port, &stops[0]));
        let line = UdpLine::connect(at, Some(shared())).expect("a socket");
        let config = client::Config { identity: 1, incarnation: 1, nonce: 7, ..client::Config::default() };
        let endpoint = Endpoint::open(line, NODE, config).expect("a session");
        let mut answer = Vec::new();
        let mut call = || block_on(&endpoint, endpoint.call(NODE, ServiceId(1), &[1; 8], &mut answer));
        call().expect("the first node responds");
        stops[0].store(true, Ordering::Relaxed);
        serving.join().expect("the server does not panic");
        // The client sends nothing while no node listens, so it gets no report of an unreachable port.
        let (port, _) = port_at(at, Some(shared()));
        scope.spawn(|| serve(port, &stops[1]));
        let mut errors = Vec::new();
        while !errors.last().is_some_and(|error| matches!(error, FabricError::Lost { .. })) {
            errors.push(call().expect_err("the new node does not know the session"));
        }
        stops[1].store(true, Ordering::Relaxed);
        let last = errors.last().expect("at least one error").to_string();
        assert!(last.contains("has restarted"), "the client did not wait for the silence period: {errors:?}");
    });
}

#[test]
fn over_tcp_every_call_is_answered_despite_delays() {
    let late = |seed| Faults { delay: 0.02, ..faults(seed) };
    let port = TcpPort::bind(LOOPBACK, 1).expect("a socket").pop().expect("one port");
    let at = port.address().expect("a bound address");
    let outcome = story(port, || TcpLine::connect(at).expect("a connection"), &late(1), &late(2));
    assert_eq!((outcome.answered.len() as u64, outcome.failed.len()), (TASKS * CALLS, 0));
    assert!(outcome.strikes.iter().all(|strikes| strikes.delayed > 0));
}

#[test]
fn a_client_learns_what_it_may_assume_after_a_reset() {
    let breaks = |seed| Faults { reset: 0.005, ..faults(seed) };
    for (at_client, at_engine) in [(breaks(3), faults(4)), (faults(3), breaks(4))] {
        let port = UdpPort::bind(LOOPBACK, 1).expect("a socket").pop().expect("one port");
        let at = port.address().expect("a bound address");
        let udp = story(port, || UdpLine::connect(at, None).expect("a socket"), &at_client, &at_engine);
        let port = TcpPort::bind(LOOPBACK, 1).expect("a socket").pop().expect("one port");
        let at = port.address().expect("a bound address");
        let tcp = story(port, || TcpLine::connect(at).expect("a connection"), &at_client, &at_engine);
        for outcome in [udp, tcp] {
            assert!(!outcome.failed.is_empty() && !outcome.answered.is_empty());
            assert!(outcome.strikes.iter().any(|strikes| strikes.resets > 0));
            assert!(at_engine.reset == 0.0 || outcome.book.broken > 0, "the engine notices the reset");
        }
    }
}
