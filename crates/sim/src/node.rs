//! A memory node: the real state machine, stepped in virtual time, with its engines.
//!
//! As in the real host, one task steps the node and responds to its clients. Each engine is a separate task with a
//! separate address. All these tasks belong to one process. The process can be stopped and killed. A later process
//! takes over the memory that the killed process left, or starts with fresh memory.
//!
//! Invariant: no code accesses the node's state while a step of the node is in progress.

mod engine;
mod start;

use crate::clock::ProcessClock;
use crate::disk::SimDisk;
use crate::fabric::verbs::OnChipOwners;
use crate::memory::{Access, Bytes, Pace, Replay, Seen};
use crate::network::{Address, HostId, Network};
use crate::nic::{Connection, Device, Nic};
use crate::world::{Bell, MICROS, MILLIS, Nanos, ProcessId, Turnstile, World, nanos};
use engine::Mail;
use farside_fabrics::session::server::RequestRef;
use farside_node::engine::Keys;
use farside_node::identity::{Sender, fenced_session};
use farside_node::log::{LogOptions, Next, StoreLog};
use farside_node::node::{Node as Machine, Progress, Ticket};
use farside_node::served::{Begun, Buffers, Called, Calling, Served, ServiceGuard, Start};
use farside_node::turn::for_runner;
use farside_remote::address::ON_CHIP_SIZE;
use farside_remote::arena::header;
use farside_remote::arena::session::SessionId;
use farside_remote::clock::Clock;
use farside_remote::control::{Answer, Ask, Membership, NodeInfo, Store};
use farside_remote::draws::Draws;
use farside_remote::fabric::ServiceId;
use farside_remote::service::{Kind, Work, addressed};
use farside_remote::{Key, NodeId, Rights, Width};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

/// Function that creates the kinds of stores that a node supports. Each start of the node calls the function.
pub type Kinds = Rc<dyn Fn() -> Vec<Box<dyn Kind<Replay>>>>;

/// Configuration of a simulated node.
#[derive(Clone, Debug)]
pub struct Options {
    /// Size of the node's memory in bytes.
    pub memory_bytes: u64,
    /// Number of engines. The port of an engine is its number.
    pub engines: u32,
    /// Whether clients reach the engines over connections, which neither lose, duplicate nor reorder messages.
    pub is_reliable: bool,
    /// Speed of accesses by the node and its engines.
    pub pace: Pace,
    /// One in this many chains runs at one instant on its engine; no chain does if the value is 0.
    pub at_once_one_in: u64,
    /// Timeout, in nanoseconds, after which a silent session ends.
    pub silence: Nanos,
    /// Maximum size of a datagram in bytes.
    pub datagram: usize,
    /// Skew of the clock of the node's process in ppm.
    pub clock_ppm: i64,
    /// Offset of the wall clock of the node's process in nanoseconds, if stores are to have a time of creation. If not,
    /// their catalog entries do not have it, as those of earlier releases.
    pub wall: Option<i64>,
    /// Minimum and maximum pause of an idle node, in nanoseconds, before it checks its stores again.
    pub idle_pause: [Nanos; 2],
    /// The node's NIC, which executes classic verbs; see [`crate::fabric::verbs`].
    pub nic: Option<Device>,
    /// Options of the logs of stores whose kinds have logs, if such stores are to have them.
    pub log: Option<LogOptions>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            memory_bytes: 24 << 20,
            engines: 2,
            is_reliable: false,
            pace: Pace::CPU,
            at_once_one_in: 8,
            silence: 60 * MILLIS,
            datagram: 4096,
            clock_ppm: 0,
            wall: None,
            idle_pause: [MILLIS / 4, 8 * MILLIS],
            nic: None,
            log: None,
        }
    }
}

/// Memory node. At times no process serves the node, such as after [`Node::kill`].
#[derive(Clone)]
pub struct Node(Rc<Inner>);

struct Inner {
    world: World,
    network: Network,
    host: HostId,
    id: NodeId,
    kinds: Kinds,
    options: Options,
    memory: RefCell<Rc<Bytes>>,
    /// The process that serves the node or recovers the node's memory, if any.
    process: Cell<Option<ProcessId>>,
    serving: RefCell<Option<Rc<Serving>>>,
    seen: Rc<Cell<Seen>>,
    /// Offset of the wall clock of the node's host in nanoseconds.
    wall: Cell<i64>,
    /// The host's files, with the logs of stores.
    disk: Rc<RefCell<SimDisk>>,
    /// Start and end of each operation of the disk. One that has not ended has the latest end.
    disk_times: Rc<RefCell<Vec<[Nanos; 2]>>>,
    /// Whether the machine has not crashed since the memory was served.
    is_same_boot: Cell<bool>,
    /// Number of processes that have ended while they recovered logs.
    ended_starts: Cell<u64>,
    /// Called once when a process serves the node.
    once_served: RefCell<Option<Box<dyn FnOnce()>>>,
}

/// A process that serves a node, and the node's state.
pub(crate) struct Serving {
    /// Itself, for tasks that it starts.
    this: RefCell<Weak<Serving>>,
    pub(crate) process: ProcessId,
    world: World,
    clock: ProcessClock,
    /// Source of the calls' random draws.
    draws: RefCell<Draws>,
    bytes: Rc<Bytes>,
    machine: RefCell<Machine<Replay>>,
    /// Memory on which the node's own accesses run.
    memory: Replay,
    step: Turnstile,
    letters: RefCell<VecDeque<Letter>>,
    /// Calls to services by clients that run their own chains. The node's task carries them out.
    calls: RefCell<VecDeque<PendingCall>>,
    /// Calls of such clients whose records are not stored yet.
    begun: RefCell<Vec<BegunCall>>,
    /// Rung when a log has new work, and when some of it is done.
    log_bell: Bell,
    /// Whether the process has had a log's writer.
    has_logs: Cell<bool>,
    disk: Rc<RefCell<SimDisk>>,
    disk_times: Rc<RefCell<Vec<[Nanos; 2]>>>,
    bell: Bell,
    recipients: RefCell<BTreeMap<Ticket, Recipient>>,
    mails: Vec<Rc<Mail>>,
    seen: Rc<Cell<Seen>>,
    idle_pause: [Nanos; 2],
    /// Whether stores have a time of creation.
    dates_stores: bool,
    nic: Option<(Nic, Device)>,
    /// The queue pairs of the engines' sessions, by the clients' identities and incarnations.
    pairs: RefCell<BTreeMap<(u128, u64), Rc<QueuePair>>>,
    next_pair: Cell<u32>,
    on_chip_owners: Rc<OnChipOwners>,
}

/// The node's half of a queue pair: the session's keys, under which the NIC accesses memory. It is closed when the
/// session ends, and dropped, too, when the node's process dies.
pub(crate) struct QueuePair {
    keys: Rc<RefCell<Keys>>,
    /// Memory whose accesses are at one instant.
    memory: Replay,
    on_chip_owners: Rc<OnChipOwners>,
    /// The client's connection to the NIC, once the client has opened it, with the NIC.
    connection: RefCell<Option<(Connection, Nic)>>,
}

impl QueuePair {
    /// Keys of the session.
    pub(crate) fn keys(&self) -> &RefCell<Keys> {
        &self.keys
    }

    /// The node's memory.
    pub(crate) fn memory(&self) -> &Replay {
        &self.memory
    }

    /// Notes the client's connection, which ends with the session.
    pub(crate) fn attach(&self, connection: &Connection) {
        *self.connection.borrow_mut() = Some((connection.clone(), connection.nic().clone()));
    }

    /// Fills the region's words in the NIC's memory with zeros unless `store` was the last key to open them.
    pub(crate) fn own_on_chip(&self, store: Key) {
        let before = self.on_chip_owners.borrow_mut().insert(store.region(), store.secret());
        if before != Some(store.secret())
            && let Some((_, nic)) = &*self.connection.borrow()
        {
            nic.clear_on_chip(u64::from(store.region()) * ON_CHIP_SIZE, ON_CHIP_SIZE);
        }
    }

    fn close(&self) {
        if let Some((connection, _)) = self.connection.take() {
            connection.close();
        }
    }
}

/// The client or engine that waits for a response of the node.
enum Recipient {
    Engine(usize, RequestRef),
    Client(Rc<OneShot<Result<Answer, String>>>),
}

/// Call to a store's service, and the recipient of its response.
struct PendingCall {
    session: SessionId,
    service: ServiceId,
    request: Vec<u8>,
    waiting: Rc<OneShot<Result<Vec<u8>, String>>>,
}

/// A call whose records are not stored yet, and the recipient of its response.
struct BegunCall {
    served: Arc<Served<Replay>>,
    begun: Begun,
    waiting: Rc<OneShot<Result<Vec<u8>, String>>>,
}

/// Slot for one value, which one task waits for.
pub(crate) struct OneShot<T> {
    given: Cell<Option<T>>,
    bell: Bell,
}

impl<T> Default for OneShot<T> {
    fn default() -> OneShot<T> {
        OneShot { given: Cell::new(None), bell: Bell::default() }
    }
}

impl<T> OneShot<T> {
    pub(crate) fn give(&self, given: T) {
        self.given.set(Some(given));
        self.bell.ring();
    }

    pub(crate) async fn received(&self) -> T {
        loop {
            if let Some(given) = self.given.take() {
                return given;
            }
            self.bell.rung().await;
        }
    }
}

/// Message to the node's task. A *local* process runs at the node's host and runs its chains itself.
pub(crate) enum Letter {
    /// A local process requests a session.
    Open(ProcessId, Rc<OneShot<Option<SessionId>>>),
    /// A local process's session has ended. The flag is true if the process closed the session, and false if the
    /// process died.
    Close(SessionId, bool),
    /// A local process calls a store's service.
    Call(SessionId, ServiceId, Vec<u8>, Rc<OneShot<Result<Vec<u8>, String>>>),
    /// A local process sends a request to the node itself.
    LocalRequest(Sender, Ask, Rc<OneShot<Result<Answer, String>>>),
    /// A remote session sends a request to the node itself. The fields are the engine's index, the session's number,
    /// the request's identifier and the request.
    RemoteRequest(usize, u32, RequestRef, Ask),
    /// A remote session has ended. The flag is true if the client closed the session.
    Ended(u32, bool),
}

/// Usual duration of an operation of the disk.
const DISK_NS: Nanos = 40 * MICROS;
/// Maximum number of steps before the node's task reads its letters again.
const STEPS_AT_A_TIME: u32 = 64;

impl Node {
    /// Starts a node at `host` with fresh memory, served by a process of its own.
    pub fn start(
        world: &World,
        network: &Network,
        host: HostId,
        id: NodeId,
        kinds: Kinds,
        options: Options,
    ) -> Node {
        let memory = RefCell::new(start::fresh(world, &options));
        let node = Node(Rc::new(Inner {
            world: world.clone(),
            network: network.clone(),
            host,
            id,
            kinds,
            wall: Cell::new(options.wall.unwrap_or(0)),
            options,
            memory,
            process: Cell::new(None),
            serving: RefCell::new(None),
            seen: Rc::default(),
            disk: Rc::default(),
            disk_times: Rc::default(),
            is_same_boot: Cell::new(true),
            ended_starts: Cell::new(0),
            once_served: RefCell::new(None),
        }));
        node.begin();
        node
    }

    /// Identifier of this node.
    pub fn id(&self) -> NodeId {
        self.0.id
    }

    /// Returns the host on which the node runs.
    pub fn host(&self) -> HostId {
        self.0.host
    }

    /// Address of the node's engine with this number.
    pub fn engine(&self, number: u32) -> Address {
        Address { host: self.0.host, port: number }
    }

    /// Returns the node's configuration.
    pub fn options(&self) -> &Options {
        &self.0.options
    }

    /// The node's present memory.
    pub fn memory(&self) -> Rc<Bytes> {
        Rc::clone(&self.0.memory.borrow())
    }

    /// Counters of accesses by the node and its clients.
    pub fn seen(&self) -> Seen {
        self.0.seen.get()
    }

    /// The process that serves the node or recovers the node's memory, if any.
    pub fn process(&self) -> Option<ProcessId> {
        self.0.process.get()
    }

    /// Whether a process serves the node.
    pub fn is_served(&self) -> bool {
        self.0.serving.borrow().is_some()
    }

    /// Returns the node's counters, such as the numbers of freed and of leaked buffers, or `None` if no process
    /// serves it.
    pub fn info(&self) -> Option<NodeInfo> {
        self.serving().map(|serving| serving.machine.borrow().info())
    }

    /// Checks that no session is bound to a fenced nonce; see [`Machine::check_bindings`].
    ///
    /// # Errors
    /// Describes the violation.
    pub fn check_bindings(&self) -> Result<(), String> {
        self.serving().map_or(Ok(()), |serving| serving.machine.borrow().check_bindings())
    }

    /// Sends a request to the node and waits for the response.
    ///
    /// # Errors
    /// The node refused the request, or no process serves it.
    pub async fn answer(&self, ask: Ask) -> Result<Answer, String> {
        let waiting = Rc::new(OneShot::default());
        // Nothing of the node's process is held while this waits: another process may take its addresses meanwhile.
        match self.serving() {
            Some(serving) => serving.post(Letter::LocalRequest(Sender::Host, ask, Rc::clone(&waiting))),
            None => return Err("no process serves the node".to_owned()),
        }
        waiting.received().await
    }

    /// Returns the number of buffers that the structure of the store `name` reaches now.
    ///
    /// # Errors
    /// The store is unknown, or no process serves the node.
    pub fn reachable(&self, name: &str) -> Result<u64, String> {
        let Some(serving) = self.serving() else { return Err("no process serves the node".to_owned()) };
        let machine = serving.machine.borrow();
        let entry = machine.catalog().get(name)?;
        let memory = Replay::new(&self.0.world, &serving.bytes, Pace::AT_ONCE);
        let served =
            entry.served.try_lock(Work::Live).ok_or("the service of the store is busy with a call")?;
        let (mut found, mut cursor) = (Vec::new(), Some(0));
        while let Some(at) = cursor {
            cursor = memory.run_at_once(|memory| served.service().live(memory, at, &mut found));
        }
        found.sort_unstable();
        found.dedup();
        Ok(found.len() as u64)
    }

    /// Time since the Unix epoch by the wall clock of the node's process, if a process serves the node.
    pub fn wall(&self) -> Option<Duration> {
        self.serving().map(|serving| serving.clock.wall())
    }

    /// Time of the creation of the store `name`, in microseconds since the Unix epoch. `None` if the store is unknown,
    /// or if no process serves the node.
    pub fn created(&self, name: &str) -> Option<u64> {
        let serving = self.serving()?;
        let machine = serving.machine.borrow();
        machine.catalog().get(name).ok().map(|entry| entry.store.created)
    }

    /// What the node holds of the store `name`, which has several members. `None` if it holds no member of it, or if no
    /// process serves the node.
    pub fn membership(&self, name: &str) -> Option<Membership> {
        let serving = self.serving()?;
        let machine = serving.machine.borrow();
        machine.catalog().get(name).ok()?.store.membership.clone()
    }

    /// Incarnation of the node's present memory.
    pub fn incarnation(&self) -> u64 {
        self.memory().load(header::INCARNATION_AT, Width::W8) as u64
    }

    /// Lets the wall clock of the node's host jump by `ns` nanoseconds, forwards or back.
    pub fn jump_wall(&self, ns: i64) {
        self.0.wall.set(self.0.wall.get().saturating_add(ns));
        if let Some(serving) = self.serving() {
            serving.clock.jump_wall(ns);
        }
    }

    /// Sends a request to the node without waiting for the response. Does nothing if no process serves the node.
    pub fn ask(&self, ask: Ask) {
        if let Some(serving) = self.serving() {
            serving.post(Letter::LocalRequest(Sender::Host, ask, Rc::default()));
        }
    }

    /// Calls `act` once a process serves the node, before it answers any client.
    pub fn once_served(&self, act: impl FnOnce() + 'static) {
        *self.0.once_served.borrow_mut() = Some(Box::new(act));
    }

    /// The store `name`, if a process serves the node and its catalog has it.
    pub fn store(&self, name: &str) -> Option<Store> {
        let serving = self.serving()?;
        let machine = serving.machine.borrow();
        machine.catalog().get(name).ok().map(|entry| entry.store.clone())
    }

    /// Start and end of each operation of the disk so far. One that has not ended has the latest end.
    pub fn disk_times(&self) -> Vec<[Nanos; 2]> {
        self.0.disk_times.borrow().clone()
    }

    /// Number of processes that have ended while they recovered logs, between two steps.
    pub fn ended_starts(&self) -> u64 {
        self.0.ended_starts.get()
    }

    pub(crate) fn serving(&self) -> Option<Rc<Serving>> {
        self.0.serving.borrow().clone()
    }

    pub(crate) fn world(&self) -> &World {
        &self.0.world
    }

    pub(crate) fn network(&self) -> &Network {
        &self.0.network
    }

    /// The files of the node's host.
    pub fn disk(&self) -> &Rc<RefCell<SimDisk>> {
        &self.0.disk
    }
}

impl Serving {
    /// The memory of the served node.
    pub(crate) fn bytes(&self) -> &Rc<Bytes> {
        &self.bytes
    }

    /// The node's NIC, if it has one.
    pub(crate) fn nic(&self) -> Option<(Nic, Device)> {
        self.nic.clone()
    }

    /// Returns the queue pair of the session of this client's incarnation, if the session is open.
    pub(crate) fn queue_pair(&self, identity: u128, incarnation: u64) -> Option<Rc<QueuePair>> {
        self.pairs.borrow().get(&(identity, incarnation)).cloned()
    }

    /// Returns a number that no other queue pair of the node has.
    pub(crate) fn next_pair(&self) -> u32 {
        self.next_pair.replace(self.next_pair.get() + 1)
    }

    /// Opens the queue pair of a session with these keys.
    fn open_pair(&self, client: (u128, u64), keys: &Rc<RefCell<Keys>>) -> Rc<QueuePair> {
        let pair = Rc::new(QueuePair {
            keys: Rc::clone(keys),
            memory: Replay::new(&self.world, &self.bytes, Pace::AT_ONCE),
            on_chip_owners: Rc::clone(&self.on_chip_owners),
            connection: RefCell::new(None),
        });
        self.pairs.borrow_mut().insert(client, Rc::clone(&pair));
        pair
    }

    /// Closes the queue pair of a session.
    fn close_pair(&self, pair: &Rc<QueuePair>) {
        pair.close();
        self.pairs.borrow_mut().retain(|_, other| !Rc::ptr_eq(other, pair));
    }

    pub(crate) fn seen(&self) -> &Rc<Cell<Seen>> {
        &self.seen
    }

    /// Time by the wall clock that a request gets, in microseconds since the Unix epoch. It is 0 if the request would
    /// create a store that is not to have a time of creation.
    fn wall_for(&self, ask: &Ask) -> u64 {
        let dates = self.dates_stores || matches!(ask, Ask::Wall { .. });
        if dates { self.clock.wall().as_micros() as u64 } else { 0 }
    }

    /// The parts of a call's context that do not lie in memory. They are drawn from a source of their own, so that
    /// services which do not use them change nothing in a run.
    pub(crate) fn start(&self) -> Start {
        Start { now: self.clock.now(), seed: self.draws.borrow_mut().next() }
    }

    /// Sends a letter to the node's task.
    pub(crate) fn post(&self, letter: Letter) {
        self.letters.borrow_mut().push_back(letter);
        self.bell.ring();
    }

    /// Wakes the node's task, which then checks for work.
    pub(crate) fn ring(&self) {
        self.bell.ring();
    }

    /// Runs the node's task: reads letters, steps the node, and responds to clients.
    async fn run(&self) {
        let mut pause = self.idle_pause[0];
        let mut looked_at = 0;
        loop {
            let rung = self.bell.rung();
            let is_busy = self.step().await;
            let mut is_rung = false;
            if !is_busy {
                let wait = self.until_timer().map_or(pause, |until| pause.min(until));
                is_rung = crate::world::within(&self.world, wait, rung).await.is_some();
            }
            let is_due = self.world.now() - looked_at >= pause;
            if is_rung || is_due {
                looked_at = self.world.now();
                let _passage = self.step.enter().await;
                let mut machine = self.machine.borrow_mut();
                machine.poll_shared();
                machine.grow_crowded(|| self.entropy());
            }
            pause = match (is_busy || is_rung, is_due) {
                (true, _) => self.idle_pause[0],
                (false, true) => (pause * 2).min(self.idle_pause[1]),
                (false, false) => pause,
            };
        }
    }

    /// Time in nanoseconds that remains until a service's background work is due, if any has asked for a time.
    fn until_timer(&self) -> Option<Nanos> {
        let time = self.machine.borrow().next_timer()?;
        let left = nanos(time.saturating_sub(self.clock.now()));
        // A step whose time has passed waits for a call.
        Some(if left == 0 { self.idle_pause[0] } else { left })
    }

    /// Steps the node for a limited number of steps and delivers responses. Returns true if the node has more to do.
    async fn step(&self) -> bool {
        let (mut progress, mut left) = (Progress::Made, STEPS_AT_A_TIME);
        while progress == Progress::Made && left > 0 {
            let _passage = self.step.enter().await;
            self.read_letters();
            self.answer_calls().await;
            if !self.begun.borrow().is_empty() {
                self.end_calls().await;
            }
            self.machine.borrow_mut().set_now(self.clock.now());
            progress = match self.steps_at_once(&mut left) {
                Ok(progress) => progress,
                Err(access) => {
                    let step = |memory: &Replay| self.machine.borrow_mut().step(memory);
                    let progress = self.memory.run_from(access, step).await;
                    self.hand_out();
                    progress
                }
            };
        }
        progress == Progress::Made
    }

    /// Steps the node until it is idle, a letter arrives, an engine waits for the node, or `left` steps have been made.
    /// If an access within a step has to wait, returns this access as the error.
    fn steps_at_once(&self, left: &mut u32) -> Result<Progress, Access> {
        loop {
            *left -= 1;
            let progress = self.memory.run_up_to(|memory| self.machine.borrow_mut().step(memory))?;
            self.hand_out();
            let is_asked = !self.letters.borrow().is_empty() || self.step.is_awaited();
            if progress == Progress::Idle || *left == 0 || is_asked {
                return Ok(progress);
            }
        }
    }

    fn read_letters(&self) {
        if self.letters.borrow().is_empty() {
            return;
        }
        let letters = std::mem::take(&mut *self.letters.borrow_mut());
        let mut machine = self.machine.borrow_mut();
        for letter in letters {
            match letter {
                // A client that has given up the opening, or has died, uses no session and closes none.
                Letter::Open(_, answer) if Rc::strong_count(&answer) == 1 => {}
                Letter::Open(process, answer) => {
                    // The session's record needs a pid other than 0, which means no process.
                    let open = |memory: &Replay| machine.open_session(memory, process.0 + 1, 1);
                    answer.give(self.memory.run_at_once(open));
                }
                Letter::Call(session, service, request, waiting) => {
                    self.calls.borrow_mut().push_back(PendingCall { session, service, request, waiting });
                }
                Letter::Close(session, said_so) => machine.end_session(session, said_so),
                Letter::LocalRequest(sender, ask, waiting) => {
                    machine.set_wall(self.wall_for(&ask));
                    let ticket = machine.ask_from(sender, ask, self.entropy());
                    self.recipients.borrow_mut().insert(ticket, Recipient::Client(waiting));
                }
                Letter::RemoteRequest(engine, number, at, ask) => {
                    let sender = Sender::Remote { engine, number };
                    machine.set_wall(self.wall_for(&ask));
                    let ticket = machine.ask_from(sender, ask, self.entropy());
                    self.recipients.borrow_mut().insert(ticket, Recipient::Engine(engine, at));
                }
                Letter::Ended(number, said_so) => machine.end_remote(number, said_so),
            }
        }
    }

    /// Serves the calls of clients that have the memory mapped.
    async fn answer_calls(&self) {
        loop {
            let next = self.calls.borrow_mut().pop_front();
            let Some(PendingCall { session, service, request, waiting }) = next else { return };
            if self.machine.borrow().is_fenced(Sender::Slot(session)) {
                waiting.give(Err(fenced_session()));
                continue;
            }
            let called = addressed(service, &request).and_then(|(key, request)| {
                let session = Some(session.number);
                let calling = Calling { key, rights: Rights::ALL, session, request };
                self.served(key).map(|served| (served, calling))
            });
            let answered = match called {
                Ok((served, calling)) => match call(&self.memory, &served, || self.start(), calling).await {
                    Ok(Err(begun)) => {
                        self.begun.borrow_mut().push(BegunCall { served, begun, waiting });
                        self.log_bell.ring();
                        continue;
                    }
                    Ok(Ok(answer)) => Ok(answer),
                    Err(refusal) => Err(refusal),
                },
                Err(refusal) => Err(refusal),
            };
            waiting.give(answered);
        }
    }

    /// Ends the calls of clients that have the memory mapped whose records are stored, or could not be.
    async fn end_calls(&self) {
        let mut at = 0;
        while at < self.begun.borrow().len() {
            let stored = {
                let begun = self.begun.borrow();
                begun[at].served.outcome(&begun[at].begun)
            };
            let Some(stored) = stored else {
                at += 1;
                continue;
            };
            let BegunCall { served, begun, waiting } = self.begun.borrow_mut().remove(at);
            let Some(attended) = served.try_lock(Work::Finish(&begun.state)) else {
                // Busy with a call of an engine: the node's task rings itself to try again.
                self.begun.borrow_mut().push(BegunCall { served, begun, waiting });
                self.bell.ring();
                return;
            };
            let ended = (&begun.state[..], &stored);
            let answered = end_call(&self.memory, &attended, self.start(), ended).await;
            attended.forget(&begun);
            waiting.give(answered);
        }
    }

    /// Runs the writer of a log until the log is removed.
    async fn write_log(&self, log: &StoreLog) {
        loop {
            let rung = self.log_bell.rung();
            let next = log.lock().next(self.clock.now());
            match next {
                Next::End => return,
                Next::Wait(None) => rung.await,
                Next::Wait(Some(until)) => {
                    let left = nanos(until.saturating_sub(self.clock.now())).max(1);
                    crate::world::within(&self.world, left, rung).await;
                }
                Next::Do(op) => {
                    let at = self.disk_times.borrow().len();
                    self.disk_times.borrow_mut().push([self.world.now(), Nanos::MAX]);
                    self.world.sleep(self.world.random().heavy(DISK_NS)).await;
                    self.disk_times.borrow_mut()[at][1] = self.world.now();
                    let done = op.perform(&mut *self.disk.borrow_mut());
                    log.lock().done(done);
                    self.mails.iter().for_each(|mail| mail.note_stored());
                    self.bell.ring();
                }
            }
        }
    }

    /// Returns the service of the store that the key opens.
    pub(crate) fn served(&self, key: Key) -> Result<Arc<Served<Replay>>, String> {
        let served = self.machine.borrow().served(key.region());
        served.ok_or_else(|| "call refused: its key opens no store".to_owned())
    }

    fn hand_out(&self) {
        let mut machine = self.machine.borrow_mut();
        for log in machine.take_new_logs() {
            let serving = self.this.borrow().upgrade().expect("the process serves");
            self.has_logs.set(true);
            self.world.spawn(self.process, async move { serving.write_log(&log).await });
        }
        if self.has_logs.get() {
            self.log_bell.ring(); // A step may have given a log work, also that of a store that is being dropped.
        }
        while let Some((engine, number)) = machine.ending() {
            self.mails[engine].end_fenced(number);
        }
        while let Some((ticket, answer)) = machine.answer() {
            self.respond(ticket, answer);
        }
    }

    fn respond(&self, ticket: Ticket, answer: Result<Answer, String>) {
        match self.recipients.borrow_mut().remove(&ticket) {
            Some(Recipient::Engine(engine, at)) => self.mails[engine].answer(at, answer),
            Some(Recipient::Client(waiting)) => waiting.give(answer.map(for_runner)),
            None => {}
        }
    }

    fn entropy(&self) -> [u64; 2] {
        [self.world.random().bits(), self.world.random().bits()]
    }
}

/// Runs a call to a store's service, access by access. No step of the node may be in progress when the call starts.
/// Returns the response, or the call if its records are not stored yet.
pub(crate) async fn call(
    memory: &Replay,
    served: &Served<Replay>,
    start: impl Fn() -> Start,
    calling: Calling<'_>,
) -> Result<Result<Vec<u8>, Begun>, String> {
    let Some(attended) = served.try_lock(Work::Call(calling.request)) else {
        return Err("call refused: the service is busy with another call; nothing was done; retry".to_owned());
    };
    run_call(memory, attended, start, calling).await
}

/// Runs a call in a guard that holds its locks. Each part of the call begins with a `start` of its own.
pub(crate) async fn run_call(
    memory: &Replay,
    attended: ServiceGuard<'_, Replay>,
    start: impl Fn() -> Start,
    calling: Calling<'_>,
) -> Result<Result<Vec<u8>, Begun>, String> {
    let (mut buffers, mut answer) = (Buffers::default(), Vec::new());
    let begun = start();
    let call = |memory: &Replay| attended.call(memory, begun, calling, &mut buffers, &mut answer);
    if let Called::Answered(answered) = memory.run(call).await {
        return answered.map(|()| Ok(answer));
    }
    let (state, stored) = match attended.append(&buffers.records, calling.session, answer) {
        Ok(begun) => return Ok(Err(begun)),
        Err(at_once) => at_once,
    };
    end_call(memory, &attended, start(), (&state, &stored)).await.map(Ok)
}

/// Runs the second part of a call.
pub(crate) async fn end_call(
    memory: &Replay,
    attended: &ServiceGuard<'_, Replay>,
    start: Start,
    ended: (&[u8], &Result<(), String>),
) -> Result<Vec<u8>, String> {
    let (mut buffers, mut answer) = (Buffers::default(), Vec::new());
    let end = |memory: &Replay| attended.end(memory, start, ended, &mut buffers, &mut answer);
    let answered = memory.run(end).await;
    answered.map(|()| answer)
}
