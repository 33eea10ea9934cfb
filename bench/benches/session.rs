//! Cost of a remote GET beyond the carrier: PRISM-KV over a session with both ends in one thread.
//!
//! The line copies datagrams between the client's end and an engine's end within one process: no system call, no other
//! thread, no wait. So the CPU time is that of the protocol at both ends, of the chain and of the client. GETs over the
//! session alternate with the same GETs on `local`. The difference between the two CPU times is the session's share.

mod support;

use farside_fabrics::executor::Core;
use farside_fabrics::local::LocalNode;
use farside_fabrics::runner::Runner;
use farside_fabrics::session::answer;
use farside_fabrics::session::carrier::{Broken, Datagrams, Line};
use farside_fabrics::session::client;
use farside_fabrics::session::endpoint::Endpoint;
use farside_fabrics::session::server::{self, End, Hello, Host, Outcome, Request, RequestRef, Server};
use farside_node::engine::{Guarded, Keys};
use farside_remote::control::{Answer, Ask, Store as StoreInfo};
use farside_remote::{ChainView, NodeId, Reply, Rights};
use farside_systems::kv::Kv;
use farside_systems::kv::prism_kv::PrismKv;
use rustix::time::{ClockId, clock_gettime};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::hint::black_box;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::{NAME, Store, median};

const VALUE_SIZE: usize = 512;
/// Size of a datagram in bytes, the same as for rings.
const DATAGRAM: usize = 24 << 10;
const ROUNDS: usize = 5;
const SLICE: Duration = Duration::from_millis(200);
/// Number of GETs between two readings of the clock.
const GETS_PER_LOOK: u64 = 64;

fn main() {
    for (records, quota) in [(4_096, 64 << 20), (1_000_000, 896 << 20)] {
        let store = Store::fill(records, VALUE_SIZE, quota);
        let direct = store.endpoint();
        let remote = Rc::new(connect(&store));
        for tasks in [1, 64] {
            let (mut near, mut far) = (Vec::new(), Vec::new());
            for _ in 0..ROUNDS {
                near.push(ns_per_get(&direct, records, tasks));
                far.push(ns_per_get(&remote, records, tasks));
            }
            let (near, far) = (median(near), median(far));
            println!(
                "{records} records, {tasks} tasks: {far:.0} ns a GET, on local {near:.0} ns, beyond that {:.0} ns",
                far - near
            );
        }
    }
}

fn ns_per_get<F>(endpoint: &Rc<F>, records: u64, tasks: usize) -> f64
where
    F: farside_remote::Fabric + farside_fabrics::executor::Turns + farside_remote::clock::Clock,
{
    let open = || {
        farside_fabrics::executor::block_on(&**endpoint, PrismKv::open(Rc::clone(endpoint), NodeId(0), NAME))
    };
    let mut clients: Vec<_> = (0..tasks).map(|_| open().expect("the store exists")).collect();
    let (gets, over, next) = (Cell::new(0), Cell::new(false), Cell::new(0x9e37_79b9_u64));
    let (started, spent) = (Instant::now(), cpu());
    let mut core = Core::new(&**endpoint);
    for client in &mut clients {
        let (gets, over, next) = (&gets, &over, &next);
        core.spawn(async move {
            while !over.get() {
                for _ in 0..GETS_PER_LOOK {
                    let number = next.get().wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    next.set(number);
                    let key = (number >> 33) % records;
                    let item = client.get(&key.to_be_bytes()).await.expect("a healthy store");
                    black_box(item.expect("every key has a value").value);
                }
                gets.set(gets.get() + GETS_PER_LOOK);
                over.set(over.get() || started.elapsed() >= SLICE);
            }
        });
    }
    core.run();
    drop(core);
    (cpu() - spent).as_nanos() as f64 / gets.get() as f64
}

/// Returns the CPU time of this thread so far, without the time of concurrent processes.
fn cpu() -> Duration {
    let spent = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(spent.tv_sec as u64, spent.tv_nsec as u32)
}

fn connect(store: &Store) -> Endpoint<Inline> {
    let config =
        server::Config { datagram: DATAGRAM, is_reliable: Inline::IS_RELIABLE, ..Default::default() };
    let engine = Engine::new(store);
    let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).expect("a descriptor");
    let far = Far { server: Server::new(config), engine, out: Vec::new() };
    let line = Inline { far: RefCell::new(far), inbox: RefCell::default(), began: Instant::now(), bell };
    let config = client::Config { identity: 1, incarnation: 1, nonce: 7, ..Default::default() };
    Endpoint::open(line, NodeId(0), config).expect("a session")
}

/// A line whose server end runs when the client end flushes.
struct Inline {
    far: RefCell<Far>,
    inbox: RefCell<VecDeque<Vec<u8>>>,
    began: Instant,
    bell: OwnedFd,
}

struct Far {
    server: Server<u8, Engine>,
    engine: Engine,
    out: Vec<u8>,
}

impl Datagrams for Inline {
    fn send(&self, datagram: &[u8]) -> Result<(), Broken> {
        let Far { server, engine, .. } = &mut *self.far.borrow_mut();
        server.receive(self.began.elapsed(), 0, datagram, engine).map_err(|error| Broken(error.to_string()))
    }

    fn flush(&self) -> Result<(), Broken> {
        let Far { server, engine, out } = &mut *self.far.borrow_mut();
        let mut inbox = self.inbox.borrow_mut();
        while server.transmit(out).is_some() {
            inbox.push_back(out.clone());
        }
        engine.runner.end_turn();
        Ok(())
    }

    fn receive(&self, mut take: impl FnMut(&[u8])) -> Result<bool, Broken> {
        let mut inbox = self.inbox.borrow_mut();
        let is_any = !inbox.is_empty();
        inbox.drain(..).for_each(|datagram| take(&datagram));
        Ok(is_any)
    }
}

impl Line for Inline {
    const IS_RELIABLE: bool = true;

    fn datagram_max(&self) -> usize {
        DATAGRAM
    }

    fn inbound_bytes(&self) -> usize {
        1 << 20
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

/// Runs the chains of a session as a node's engine does.
struct Engine {
    node: Arc<farside_node::host::Host>,
    runner: Runner,
    reply: Reply,
    expected: VecDeque<usize>,
}

impl Engine {
    fn new(store: &Store) -> Engine {
        let node = Arc::clone(&store.host);
        let session = LocalNode::open_session(&*node).expect("a session");
        let runner = Runner::new(Arc::clone(LocalNode::memory(&*node)), session);
        Engine { node, runner, reply: Reply::new(), expected: VecDeque::new() }
    }

    fn ask(&self, keys: &mut Keys, request: &[u8]) -> Vec<u8> {
        let ask: Ask = serde_json::from_slice(request).expect("a request to the node");
        let answer = match self.node.ask(ask, Duration::from_secs(5)).expect("an answer") {
            Answer::Store(store) => {
                let own = keys.grant(&store, Rights::ALL, 77);
                Answer::Store(StoreInfo { secret: own.secret(), ..store })
            }
            answer => answer,
        };
        serde_json::to_vec(&answer).expect("plain data")
    }
}

impl Host for Engine {
    type Session = Keys;

    fn secret(&mut self) -> u64 {
        5
    }

    fn open(&mut self, _hello: &Hello<'_>) -> Result<Keys, String> {
        Ok(Keys::default())
    }

    fn expect(&mut self, _keys: &mut Keys, request: Request<'_>) {
        if let Request::Chain(bytes) = request {
            let hints = ChainView::decode(bytes).map_or(0, |(chain, _)| self.runner.expect(chain));
            self.expected.push_back(hints);
        }
    }

    fn ready(&mut self) {
        self.runner.fetch_ahead();
    }

    fn run(
        &mut self,
        keys: &mut Keys,
        _at: RequestRef,
        request: Request<'_>,
        reply: &mut Vec<u8>,
    ) -> Outcome {
        match request {
            Request::Chain(bytes) => {
                let (chain, _) = ChainView::decode(bytes).expect("a valid chain");
                self.runner.proceed(self.expected.pop_front().unwrap_or(0));
                self.runner.enter();
                let seen = Guarded { memory: self.runner.memory(), keys };
                self.runner.run_on(&seen, 1, chain, &mut self.reply);
                reply.extend_from_slice(self.reply.as_bytes());
            }
            Request::Call(_, request) => answer::put_body(reply, &self.ask(keys, request)),
            Request::Retire(_) => {}
        }
        Outcome::Done
    }

    fn close(&mut self, _keys: Keys, _end: End) {}
}
