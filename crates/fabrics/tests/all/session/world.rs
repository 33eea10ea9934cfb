//! A network, a server and clients, simulated step by step: equal seeds give equal runs.
//!
//! Invariant: every request that runs is recorded by its tag, and runs once.
//! Invariant: the correct reply to a request is determined by the request's tag and size alone.
//! Invariant: all faults that strike are counted.

use farside_fabrics::session::client::{self, Ask, Client, Event, Fate, SlotRef};
use farside_fabrics::session::server::{
    self, End as Ending, Hello, Host, Outcome, Request, RequestRef, Server,
};
use farside_remote::Addr;
use farside_remote::draws::Draws;
use farside_remote::fabric::ServiceId;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet};
use std::time::Duration;

pub(crate) const MS: Duration = Duration::from_millis(1);

#[derive(Clone, Copy, Default)]
pub(crate) struct Faults {
    /// Percentage of datagrams lost.
    pub(crate) loss: u64,
    pub(crate) doubled: u64,
    /// Percentage of datagrams that take a hundred times as long as usual.
    pub(crate) late: u64,
    pub(crate) damaged: u64,
    /// Percentage of datagrams at which a partition begins. It lasts up to 100 ms; half of them cut one direction only.
    pub(crate) cut: u64,
    pub(crate) partition: bool,
    /// Additional delay of all datagrams.
    pub(crate) slower: Duration,
    /// Whether datagrams overtake each other even if none is late.
    pub(crate) unordered: bool,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Struck {
    pub(crate) lost: u64,
    pub(crate) doubled: u64,
    pub(crate) late: u64,
    pub(crate) damaged: u64,
    pub(crate) cut: u64,
    pub(crate) overtaken: u64,
}

impl Struck {
    pub(crate) fn add(&mut self, other: Struck) {
        self.lost += other.lost;
        self.doubled += other.doubled;
        self.late += other.late;
        self.damaged += other.damaged;
        self.cut += other.cut;
        self.overtaken += other.overtaken;
    }

    /// Whether every kind of fault has struck, so that all kinds are tested.
    pub(crate) fn all_did(&self) -> bool {
        let Struck { lost, doubled, late, damaged, cut, overtaken } = *self;
        [lost, doubled, late, damaged, cut, overtaken].iter().all(|&times| times > 0)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum To {
    Server(usize),
    Client(usize),
}

impl To {
    fn back(self) -> To {
        match self {
            To::Server(index) => To::Client(index),
            To::Client(index) => To::Server(index),
        }
    }
}

/// A host that runs every request, and counts how often each ran.
#[derive(Default)]
pub(crate) struct Runner {
    pub(crate) runs: HashMap<u64, u64>,
    /// Responses that are still to be sent: the time of each, its request and its bytes.
    pub(crate) later: Vec<(Duration, RequestRef, Vec<u8>)>,
    pub(crate) now: Duration,
    pub(crate) secrets: u64,
    pub(crate) opened: u64,
    /// Endings of sessions, in the order in which they occurred.
    pub(crate) closed: Vec<Ending>,
    pub(crate) refuse: Option<String>,
    pub(crate) features_seen: u64,
    pub(crate) retired: u64,
    pub(crate) retired_tags: HashSet<u64>,
    /// The expected chains of the datagram whose requests run now.
    pub(crate) expected: Vec<Vec<u8>>,
    pub(crate) is_ready: bool,
    /// Number of chains that ran, and how many of them were expected.
    pub(crate) chains: [u64; 2],
    /// Whether to accept and answer any request, even an invalid one.
    pub(crate) is_lenient: bool,
}

impl Host for Runner {
    type Session = (u128, u64);

    fn secret(&mut self) -> u64 {
        self.secrets += 1;
        Draws(0x5ec_0000 + self.secrets).next()
    }
    fn open(&mut self, hello: &Hello<'_>) -> Result<(u128, u64), String> {
        self.features_seen = hello.features;
        if let Some(reason) = &self.refuse {
            return Err(reason.clone());
        }
        self.opened += 1;
        Ok((hello.identity, hello.incarnation))
    }
    fn expect(&mut self, _session: &mut (u128, u64), request: Request<'_>) {
        if std::mem::take(&mut self.is_ready) {
            self.expected.clear();
        }
        let Request::Chain(bytes) = request else { panic!("only chains are expected") };
        self.expected.push(bytes.to_vec());
    }
    fn ready(&mut self) {
        assert!(!self.expected.is_empty() && !self.is_ready, "called once, after expect");
        self.is_ready = true;
    }
    fn run(
        &mut self,
        _session: &mut (u128, u64),
        at: RequestRef,
        request: Request<'_>,
        reply: &mut Vec<u8>,
    ) -> Outcome {
        assert!(self.expected.is_empty() || self.is_ready, "no request runs before ready");
        let bytes = match request {
            Request::Chain(bytes) => {
                let at = self.expected.iter().position(|expected| expected == bytes);
                self.chains[0] += 1;
                self.chains[1] += u64::from(at.is_some());
                at.map(|at| self.expected.swap_remove(at));
                bytes
            }
            Request::Call(service, bytes) => {
                assert!(service == ServiceId(7) || self.is_lenient, "the service of the call");
                bytes
            }
            Request::Retire(buffers) => {
                for (_, buffer) in buffers {
                    self.retired += 1;
                    let is_first = self.retired_tags.insert(buffer.raw());
                    assert!(is_first || self.is_lenient, "a buffer is retired once");
                }
                return Outcome::Done;
            }
        };
        if self.is_lenient {
            reply.resize(bytes.len() * 8 % 65_536, 1);
            return Outcome::Done;
        }
        let order = Order::decode(bytes);
        *self.runs.entry(order.tag).or_default() += 1;
        if order.later_ms == 0 {
            order.answer(reply);
            return Outcome::Done;
        }
        let mut answer = Vec::new();
        order.answer(&mut answer);
        self.later.push((self.now + MS * order.later_ms, at, answer));
        Outcome::Later
    }
    fn close(&mut self, _session: (u128, u64), end: Ending) {
        self.closed.push(end);
    }
}

/// A request of these tests: `| tag u64 | bytes of the reply u32 | delay in ms u32 |`, then a pattern. A request
/// shorter than 16 bytes contains only the first bytes of this form.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Order {
    pub(crate) tag: u64,
    pub(crate) size: usize,
    pub(crate) reply_size: usize,
    pub(crate) later_ms: u32,
}

fn pattern(tag: u64, at: usize) -> u8 {
    (tag as u8).wrapping_mul(31).wrapping_add(at as u8).wrapping_add((at >> 8) as u8)
}

impl Order {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&self.tag.to_le_bytes());
        bytes.extend_from_slice(&(self.reply_size as u32).to_le_bytes());
        bytes.extend_from_slice(&self.later_ms.to_le_bytes());
        (bytes.len()..self.size).for_each(|at| bytes.push(pattern(self.tag, at)));
        bytes.truncate(self.size);
        bytes
    }
    fn decode(bytes: &[u8]) -> Order {
        if bytes.len() < 16 {
            return Order { tag: u64::MAX, size: bytes.len(), reply_size: bytes.len(), later_ms: 0 };
        }
        let tag = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let reply_size = u32::from_le_bytes(bytes[8..12].try_into().unwrap()) as usize;
        let later_ms = u32::from_le_bytes(bytes[12..16].try_into().unwrap());
        for (at, &byte) in bytes.iter().enumerate().skip(16) {
            assert_eq!(byte, pattern(tag, at), "byte {at} of request {tag} belongs to another");
        }
        Order { tag, size: bytes.len(), reply_size, later_ms }
    }
    fn answer(&self, reply: &mut Vec<u8>) {
        assert!(reply.is_empty(), "a reply begins empty");
        reply.extend((0..self.reply_size).map(|at| pattern(!self.tag, at)));
    }
    fn check(&self, reply: &[u8]) {
        assert_eq!(reply.len(), self.reply_size, "the reply to {self:?}");
        let tag = if self.size < 16 { u64::MAX } else { self.tag };
        for (at, &byte) in reply.iter().enumerate() {
            assert_eq!(byte, pattern(!tag, at), "byte {at} of the reply to {self:?}");
        }
    }
}

/// Outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Answered(u64),
    Failed(Fate),
}

pub(crate) struct Peer {
    pub(crate) client: Client,
    pub(crate) asked: HashMap<SlotRef, Order>,
    pub(crate) ends: BTreeMap<u64, End>,
    pub(crate) events: Vec<Event>,
    /// Requests that were answered, and whose responses this owner has not released.
    pub(crate) held: Vec<(SlotRef, Order)>,
    /// Whether to retire the buffer named by a request's tag after the request is released (`is_retiring`), and the
    /// buffers still to retire (`unreachable`).
    pub(crate) is_retiring: bool,
    pub(crate) unreachable: Vec<(u32, Addr)>,
    /// Probability in percent that this owner delays a step, or the release of a response.
    pub(crate) slow: u64,
    rng: Draws,
    /// Whether this owner is stopped: it receives nothing and does nothing.
    pub(crate) is_paused: bool,
    pub(crate) executions: Vec<u64>,
    pub(crate) outstanding_max: usize,
    pub(crate) busy_max: usize,
}

impl Peer {
    pub(crate) fn new(now: Duration, config: client::Config) -> Peer {
        Peer {
            client: Client::new(now, config),
            asked: HashMap::new(),
            ends: BTreeMap::new(),
            events: Vec::new(),
            held: Vec::new(),
            is_retiring: false,
            unreachable: Vec::new(),
            slow: 0,
            rng: Draws(1),
            is_paused: false,
            executions: Vec::new(),
            outstanding_max: 0,
            busy_max: 0,
        }
    }

    pub(crate) fn ask(&mut self, now: Duration, order: Order) -> Option<SlotRef> {
        let bytes = order.encode();
        let (left, right) = bytes.split_at(bytes.len() / 3);
        let ask = if order.tag.is_multiple_of(2) { Ask::Chain } else { Ask::Call(ServiceId(7)) };
        let request = self.client.submit(now, ask, &[left, right])?;
        assert!(self.asked.insert(request, order).is_none(), "requests have unique identifiers");
        self.busy_max = self.busy_max.max(self.asked.len());
        Some(request)
    }

    /// Checks that the responses reported before are intact, and releases them, some later. Then reads new events.
    pub(crate) fn turn(&mut self, now: Duration) {
        for (request, order) in std::mem::take(&mut self.held) {
            order.check(self.client.reply(request));
            if self.rng.percent(self.slow) {
                self.held.push((request, order));
                continue;
            }
            self.client.release(request);
            if self.is_retiring {
                self.unreachable.push((3, Addr::new(order.tag)));
            }
        }
        self.listen();
        if !self.rng.percent(self.slow)
            && (self.unreachable.is_empty() || self.client.retire(now, &self.unreachable))
        {
            self.unreachable.clear();
        }
    }

    fn listen(&mut self) {
        while let Some(event) = self.client.next_event() {
            match &event {
                Event::Answered { request, execution } => {
                    let order = self.asked.remove(request).expect("a response to an outstanding request");
                    order.check(self.client.reply(*request));
                    self.held.push((*request, order));
                    assert!(
                        *execution > 0 && !self.executions.contains(execution),
                        "execution numbers are unique"
                    );
                    self.executions.push(*execution);
                    assert!(self.ends.insert(order.tag, End::Answered(*execution)).is_none());
                }
                Event::Failed { request, fate } => {
                    let order = self.asked.remove(request).expect("a report of an outstanding request");
                    assert!(self.ends.insert(order.tag, End::Failed(*fate)).is_none());
                }
                _ => {}
            }
            self.events.push(event);
        }
    }
}

type Flight = (Duration, u64, To, Vec<u8>);

pub(crate) struct World {
    pub(crate) now: Duration,
    pub(crate) rng: Draws,
    pub(crate) faults: Faults,
    pub(crate) struck: Struck,
    pub(crate) host: Runner,
    pub(crate) server: Server<usize, Runner>,
    pub(crate) server_config: server::Config,
    pub(crate) peers: Vec<Peer>,
    pub(crate) flights: BinaryHeap<Reverse<Flight>>,
    pub(crate) sent: u64,
    /// For each end, the latest arrival time of a datagram that is not late.
    arrives: BTreeMap<To, Duration>,
    /// For each end, the time at which the partition that cuts off this end is over.
    cut: BTreeMap<To, Duration>,
    pub(crate) steps: u64,
    out: Vec<u8>,
}

impl World {
    pub(crate) fn new(seed: u64, server_config: server::Config) -> World {
        World {
            now: MS,
            rng: Draws(seed),
            faults: Faults::default(),
            struck: Struck::default(),
            host: Runner::default(),
            server: Server::new(server_config.clone()),
            server_config,
            peers: Vec::new(),
            flights: BinaryHeap::new(),
            sent: 0,
            arrives: BTreeMap::new(),
            cut: BTreeMap::new(),
            steps: 0,
            out: Vec::new(),
        }
    }

    pub(crate) fn join(&mut self, config: client::Config) -> usize {
        self.peers.push(Peer::new(self.now, config));
        self.peers.len() - 1
    }

    /// Replaces the node's process by a new one.
    pub(crate) fn restart_server(&mut self) {
        self.server_config.node += 1;
        self.server = Server::new(self.server_config.clone());
        self.host.later.clear();
    }

    fn send(&mut self, to: To) {
        let bytes = self.out.clone();
        if self.faults.cut > 0 && self.rng.percent(self.faults.cut) {
            let until = self.now + MS * self.rng.below(100) as u32;
            self.cut.insert(to, until);
            if self.rng.percent(50) {
                self.cut.insert(to.back(), until);
            }
        }
        if self.faults.partition || self.cut.get(&to).is_some_and(|&until| self.now < until) {
            self.struck.cut += 1;
            return;
        }
        let copies = if self.rng.percent(self.faults.doubled) { 2 } else { 1 };
        self.struck.doubled += copies - 1;
        for _ in 0..copies {
            if self.rng.percent(self.faults.loss) {
                self.struck.lost += 1;
                continue;
            }
            let mut bytes = bytes.clone();
            if self.rng.percent(self.faults.damaged) {
                self.struck.damaged += 1;
                let at = self.rng.below(bytes.len() as u64) as usize;
                bytes[at] ^= 1 << self.rng.below(8);
            }
            let delay = Duration::from_micros(20 + self.rng.below(200));
            let mut at = self.now + delay + self.faults.slower;
            if self.rng.percent(self.faults.late) {
                self.struck.late += 1;
                at += delay * 99;
            } else {
                let last = self.arrives.entry(to).or_default();
                if !self.faults.unordered {
                    at = at.max(*last);
                }
                self.struck.overtaken += u64::from(at < *last);
                *last = at.max(*last);
            }
            self.sent += 1;
            self.flights.push(Reverse((at, self.sent, to, bytes)));
        }
    }

    /// Lets all ends send all their pending datagrams.
    pub(crate) fn flush(&mut self) {
        let mut out = std::mem::take(&mut self.out);
        for index in 0..self.peers.len() {
            if self.peers[index].is_paused {
                continue;
            }
            self.peers[index].turn(self.now);
            while self.peers[index].client.transmit(self.now, &mut out) {
                let outstanding = self.peers[index].client.outstanding();
                assert!(outstanding <= self.server_config.credit(), "the client keeps to its credit");
                assert!(out.len() <= self.server_config.datagram, "the client keeps to the datagram limit");
                self.peers[index].outstanding_max = self.peers[index].outstanding_max.max(outstanding);
                std::mem::swap(&mut out, &mut self.out);
                self.send(To::Server(index));
                std::mem::swap(&mut out, &mut self.out);
            }
            self.peers[index].turn(self.now);
        }
        while let Some(index) = self.server.transmit(&mut out) {
            assert!(out.len() <= self.server_config.datagram, "the server keeps to the datagram limit");
            std::mem::swap(&mut out, &mut self.out);
            self.send(To::Client(index));
            std::mem::swap(&mut out, &mut self.out);
        }
        self.out = out;
    }

    /// Returns the time of the next event.
    fn next(&self) -> Option<Duration> {
        let flight = self.flights.peek().map(|Reverse(flight)| flight.0);
        let later = self.host.later.iter().map(|later| later.0).min();
        let awake = self.peers.iter().filter(|peer| !peer.is_paused);
        let timeout = awake.filter_map(|peer| peer.client.next_timeout()).min();
        [flight, later, timeout].into_iter().flatten().min()
    }

    /// Advances to the next event, but not beyond `until`. Returns false if there is no event before `until`.
    pub(crate) fn step(&mut self, until: Duration) -> bool {
        self.flush();
        let next = self.next().filter(|&next| next <= until);
        let Some(next) = next else {
            self.now = self.now.max(until);
            self.server.expire(self.now, &mut self.host);
            return false;
        };
        self.steps += 1;
        self.now = self.now.max(next);
        self.host.now = self.now;
        while self.flights.peek().is_some_and(|Reverse(flight)| flight.0 <= self.now) {
            let Some(Reverse((_, _, to, bytes))) = self.flights.pop() else { break };
            match to {
                To::Server(from) => {
                    let _ = self.server.receive(self.now, from, &bytes, &mut self.host);
                }
                To::Client(index) if !self.peers[index].is_paused => {
                    let _ = self.peers[index].client.receive(self.now, &bytes);
                }
                To::Client(_) => {}
            }
        }
        let now = self.now;
        let (due, later) = std::mem::take(&mut self.host.later).into_iter().partition(|later| later.0 <= now);
        self.host.later = later;
        for (_, at, answer) in Vec::<_>::into_iter(due) {
            self.server.answer(at, &answer);
        }
        self.server.expire(self.now, &mut self.host);
        self.flush();
        true
    }

    pub(crate) fn run_for(&mut self, duration: Duration) {
        let until = self.now + duration;
        while self.step(until) {
            assert!(self.steps < 2_000_000, "the run never ends");
        }
    }

    /// Runs until all requests are reported.
    pub(crate) fn settle(&mut self, within: Duration) {
        let until = self.now + within;
        while self.peers.iter().any(|peer| !peer.asked.is_empty()) && self.step(until) {
            assert!(self.steps < 2_000_000, "the run never ends");
        }
        for peer in &self.peers {
            assert!(peer.asked.is_empty(), "never reported: {:?}", peer.asked);
        }
    }

    pub(crate) fn runs(&self, tag: u64) -> u64 {
        self.host.runs.get(&tag).copied().unwrap_or(0)
    }
}

/// Runs `story` for every seed, or for the one seed that the environment names. After a failure, prints the command
/// that replays it.
pub(crate) fn seeds(test: &str, count: u64, story: impl Fn(u64)) {
    let only = std::env::var("SESSION_SEED").ok().map(|seed| seed.parse().expect("a seed is a number"));
    let range = only.map_or(0..count, |seed: u64| seed..seed + 1);
    for seed in range {
        if let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| story(seed))) {
            eprintln!(
                "seed {seed} failed; replay: SESSION_SEED={seed} cargo test -p farside-fabrics --test all {test}"
            );
            std::panic::resume_unwind(panic);
        }
    }
}
