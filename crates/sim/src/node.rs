//! A memory node: the state machine that is served in earnest, stepped in virtual time, with engines.
//!
//! As in the real host, one task steps the node and answers its clients, and each engine is a task at an address of its
//! own; all are of one process, which can be stopped, killed, and started anew over the memory that it left or over
//! fresh memory. Invariant: nothing asks anything of the node's state while a step of it is under way.

mod engine;

use crate::clock::ProcessClock;
use crate::fault::Whom;
use crate::memory::{Access, Bytes, Pace, Replay, Seen};
use crate::network::{Address, HostId, Network};
use crate::world::{Bell, MICROS, MILLIS, Nanos, ProcessId, Turnstile, World};
use engine::Mail;
use farside_fabrics::session::server::RequestRef;
use farside_node::node::{Node as Machine, Progress, Ticket};
use farside_node::served::Served;
use farside_remote::arena::header;
use farside_remote::arena::session::SessionId;
use farside_remote::control::{Answer, Ask, NodeInfo, Store};
use farside_remote::fabric::ServiceId;
use farside_remote::service::{Kind, addressed};
use farside_remote::{Key, NodeId, Rights, Width};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

/// The kinds of stores that a node is to know, made for each of its starts.
pub type Kinds = Rc<dyn Fn() -> Vec<Box<dyn Kind<Replay>>>>;

/// How a node is run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Of its memory.
    pub memory_bytes: u64,
    /// Engines, each at the port of its number.
    pub engines: u32,
    /// Whether what reaches them comes over connections, which neither lose, double nor reorder.
    pub is_reliable: bool,
    /// How accesses are made by it and its engines.
    pub pace: Pace,
    /// One chain in so many is run by its engine at one instant; 0 is none.
    pub at_once_one_in: u64,
    /// A session of which nothing was heard for so long ends.
    pub silence: Nanos,
    /// The most bytes of a datagram.
    pub datagram: usize,
    /// How many millionths the clock of its process runs faster than the world's.
    pub clock_ppm: i64,
    /// How long the node waits, when nothing happens, until it looks around by itself: at first, and at last.
    pub look: [Nanos; 2],
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
            look: [MILLIS / 4, 8 * MILLIS],
        }
    }
}

/// A memory node, whether a process serves it at the moment or not.
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
    /// The process that serves it, or is about to.
    process: Cell<Option<ProcessId>>,
    serving: RefCell<Option<Rc<Serving>>>,
    seen: Rc<Cell<Seen>>,
}

/// A process that serves a node.
pub(crate) struct Serving {
    pub(crate) process: ProcessId,
    world: World,
    clock: ProcessClock,
    bytes: Rc<Bytes>,
    machine: RefCell<Machine<Replay>>,
    /// The node's own accesses, and who may ask its state anything.
    memory: Replay,
    step: Turnstile,
    letters: RefCell<VecDeque<Letter>>,
    /// Calls to services by clients that run their chains themselves: the node's task answers them.
    calls: RefCell<VecDeque<Called>>,
    bell: Bell,
    asked: RefCell<BTreeMap<Ticket, Asker>>,
    mails: Vec<Rc<Mail>>,
    seen: Rc<Cell<Seen>>,
    look: [Nanos; 2],
}

/// Who waits for an answer.
enum Asker {
    Engine(usize, RequestRef),
    Client(Rc<Waiting<Result<Answer, String>>>),
}

/// A call to a store's service, and who waits for its answer.
struct Called {
    service: ServiceId,
    request: Vec<u8>,
    waiting: Rc<Waiting<Result<Vec<u8>, String>>>,
}

/// Something that somebody waits for.
pub(crate) struct Waiting<T> {
    given: Cell<Option<T>>,
    bell: Bell,
}

impl<T> Default for Waiting<T> {
    fn default() -> Waiting<T> {
        Waiting { given: Cell::new(None), bell: Bell::default() }
    }
}

impl<T> Waiting<T> {
    pub(crate) fn give(&self, given: T) {
        self.given.set(Some(given));
        self.bell.ring();
    }

    pub(crate) async fn taken(&self) -> T {
        loop {
            if let Some(given) = self.given.take() {
                return given;
            }
            self.bell.rung().await;
        }
    }
}

/// What the node's task is told.
pub(crate) enum Letter {
    /// A process of this host wants a session by which it runs chains itself.
    Open(ProcessId, Rc<Waiting<Option<SessionId>>>),
    /// A process that had one has ended, or says that it runs no more chains.
    Close(SessionId, bool),
    /// It calls a store's service.
    Called(ServiceId, Vec<u8>, Rc<Waiting<Result<Vec<u8>, String>>>),
    /// It asks.
    AskedDirectly(Ask, Rc<Waiting<Result<Answer, String>>>),
    /// A remote session asks.
    Asked(usize, RequestRef, Ask),
    /// A remote session runs no more chains.
    Ended(u32, bool),
}

/// How a memory is taken over: few of the many accesses wait, since all before one that did are replayed.
const TAKES_OVER: Pace =
    Pace { usual_ns: MICROS, late_one_in: 100, stalled_one_in: 100, relaxed: false, by_cpu: true };
/// Steps made before letters are read again.
const STEPS_AT_A_TIME: u32 = 64;

impl Node {
    /// A node at `host` with fresh memory, served by a process of its own.
    pub fn start(
        world: &World,
        network: &Network,
        host: HostId,
        id: NodeId,
        kinds: Kinds,
        options: Options,
    ) -> Node {
        let memory = RefCell::new(fresh(world, &options));
        let node = Node(Rc::new(Inner {
            world: world.clone(),
            network: network.clone(),
            host,
            id,
            kinds,
            options,
            memory,
            process: Cell::new(None),
            serving: RefCell::new(None),
            seen: Rc::default(),
        }));
        node.begin();
        node
    }

    /// Its name.
    pub fn id(&self) -> NodeId {
        self.0.id
    }

    /// Where it is.
    pub fn host(&self) -> HostId {
        self.0.host
    }

    /// Where its engine of that number is.
    pub fn engine(&self, number: u32) -> Address {
        Address { host: self.0.host, port: number }
    }

    /// How it is run.
    pub fn options(&self) -> &Options {
        &self.0.options
    }

    /// Its memory as it is now.
    pub fn memory(&self) -> Rc<Bytes> {
        Rc::clone(&self.0.memory.borrow())
    }

    /// What its accesses and those of its clients have seen.
    pub fn seen(&self) -> Seen {
        self.0.seen.get()
    }

    /// The process that serves it, or is taking it over, if there is one.
    pub fn process(&self) -> Option<ProcessId> {
        self.0.process.get()
    }

    /// Whether a process serves it.
    pub fn is_served(&self) -> bool {
        self.0.serving.borrow().is_some()
    }

    /// How many buffers have come back to their lists since it was started, and how many scans have found lost.
    pub fn info(&self) -> Option<NodeInfo> {
        self.serving().map(|serving| serving.machine.borrow().info())
    }

    /// Asks it something, and waits for the answer.
    ///
    /// # Errors
    /// Its refusal; or no process serves it.
    pub async fn answer(&self, ask: Ask) -> Result<Answer, String> {
        let Some(serving) = self.serving() else { return Err("no process serves it".to_owned()) };
        let waiting = Rc::new(Waiting::default());
        serving.post(Letter::AskedDirectly(ask, Rc::clone(&waiting)));
        waiting.taken().await
    }

    /// How many buffers the structure of the store of that name reaches, now.
    ///
    /// # Errors
    /// There is none of that name, or no process serves the node.
    pub fn reachable(&self, name: &str) -> Result<u64, String> {
        let Some(serving) = self.serving() else { return Err("no process serves it".to_owned()) };
        let machine = serving.machine.borrow();
        let entry = machine.catalog().get(name)?;
        let memory = Replay::new(&self.0.world, &serving.bytes, Pace::AT_ONCE);
        let mut served = entry.served.try_attend().ok_or("its service is in the middle of a call")?;
        let (mut found, mut cursor) = (Vec::new(), Some(0));
        while let Some(at) = cursor {
            cursor = memory.run_at_once(|memory| served.service().live(memory, at, &mut found));
        }
        found.sort_unstable();
        found.dedup();
        Ok(found.len() as u64)
    }

    /// Asks it something, without waiting for the answer. Nothing if no process serves it.
    pub fn ask(&self, ask: Ask) {
        if let Some(serving) = self.serving() {
            serving.post(Letter::AskedDirectly(ask, Rc::default()));
        }
    }

    /// Ends the process that serves it, or is taking it over. Its memory stays.
    pub fn kill(&self) {
        self.0.serving.take();
        if let Some(process) = self.0.process.take() {
            for engine in 0..self.0.options.engines {
                self.0.network.hang_up_all(self.engine(engine));
            }
            self.0.world.kill(process);
        }
    }

    /// Has a process take over the memory that another left, access by access, and serve it then. Whoever ran chains
    /// on it itself must be dead.
    pub fn restart(&self) {
        self.kill();
        let Inner { world, seen, .. } = &*self.0;
        let process = world.start_process();
        self.0.process.set(Some(process));
        let memory = Replay::new(world, &self.memory(), TAKES_OVER).seen_by(seen);
        let node = self.clone();
        world.spawn(process, async move {
            let info = node.info_of(process);
            let restored =
                memory.run(|memory| Machine::restore(memory, (node.0.kinds)(), info.clone())).await;
            let machine = restored
                .unwrap_or_else(|reason| panic!("a node does not take over what another left: {reason}"));
            node.serve(process, machine);
        });
    }

    /// The memory is lost, and a process serves a fresh one.
    pub fn lose_memory(&self) {
        self.kill();
        *self.0.memory.borrow_mut() = fresh(&self.0.world, &self.0.options);
        self.begin();
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

    /// A process begins to serve a memory that nobody has used.
    fn begin(&self) {
        let process = self.0.world.start_process();
        self.0.process.set(Some(process));
        let memory = Replay::new(&self.0.world, &self.memory(), Pace::AT_ONCE);
        self.serve(process, Machine::new(&memory, (self.0.kinds)(), self.info_of(process)));
    }

    fn info_of(&self, process: ProcessId) -> NodeInfo {
        NodeInfo {
            pid: process.0,
            incarnation: self.memory().load(header::INCARNATION_AT, Width::W8) as u64,
            memory_bytes: self.0.options.memory_bytes,
            ..NodeInfo::default()
        }
    }

    /// The process serves the memory with this machine.
    fn serve(&self, process: ProcessId, machine: Machine<Replay>) {
        let Inner { world, network, options, seen, .. } = &*self.0;
        let bytes = self.memory();
        let memory = Replay::new(world, &bytes, options.pace).seen_by(seen);
        let engines = options.engines as usize;
        let serving = Rc::new(Serving {
            process,
            world: world.clone(),
            clock: ProcessClock::new(world, options.clock_ppm, network.struck(), Whom::Node(self.0.id.0)),
            bytes,
            machine: RefCell::new(machine),
            memory,
            step: Turnstile::default(),
            letters: RefCell::default(),
            calls: RefCell::default(),
            bell: Bell::default(),
            asked: RefCell::default(),
            mails: (0..engines).map(|_| Rc::default()).collect(),
            seen: Rc::clone(seen),
            look: options.look,
        });
        for index in 0..engines {
            let inbox = network.bind(self.engine(index as u32));
            let engine = engine::Engine::new(&serving, network, inbox, index, options);
            world.spawn(process, engine.run());
        }
        let tended = Rc::clone(&serving);
        world.spawn(process, async move { tended.tend().await });
        *self.0.serving.borrow_mut() = Some(serving);
    }
}

/// A memory that nobody has used.
fn fresh(world: &World, options: &Options) -> Rc<Bytes> {
    let bytes = Bytes::new(options.memory_bytes);
    let words = [
        (header::MAGIC_AT, header::MAGIC),
        (header::VERSION_AT, header::VERSION),
        (header::SIZE_AT, options.memory_bytes),
        (header::INCARNATION_AT, world.random().bits() | 1),
    ];
    words.iter().for_each(|(at, word)| bytes.poke(*at, &word.to_le_bytes()));
    Rc::new(bytes)
}

impl Serving {
    /// The memory that it serves.
    pub(crate) fn bytes(&self) -> &Rc<Bytes> {
        &self.bytes
    }

    pub(crate) fn seen(&self) -> &Rc<Cell<Seen>> {
        &self.seen
    }

    /// Tells the node's task.
    pub(crate) fn post(&self, letter: Letter) {
        self.letters.borrow_mut().push_back(letter);
        self.bell.ring();
    }

    /// Wakes the node if it sleeps.
    pub(crate) fn ring(&self) {
        self.bell.ring();
    }

    /// The node's task.
    async fn tend(&self) {
        let mut pause = self.look[0];
        let mut looked_at = 0;
        loop {
            let rung = self.bell.rung();
            let is_busy = self.step().await;
            let mut is_rung = false;
            if !is_busy {
                is_rung = crate::world::within(&self.world, pause, rung).await.is_some();
            }
            let is_due = self.world.now() - looked_at >= pause;
            if is_rung || is_due {
                looked_at = self.world.now();
                let _passage = self.step.enter().await;
                let mut machine = self.machine.borrow_mut();
                machine.look_around();
                for name in machine.crowded() {
                    let ticket = machine.ask(Ask::GrowStore { name }, self.entropy());
                    machine.cancel(&[ticket].into());
                }
            }
            pause = match (is_busy || is_rung, is_due) {
                (true, _) => self.look[0],
                (false, true) => (pause * 2).min(self.look[1]),
                (false, false) => pause,
            };
        }
    }

    /// Steps the node for a while and hands out answers; true if there is more to do.
    async fn step(&self) -> bool {
        let (mut progress, mut left) = (Progress::Made, STEPS_AT_A_TIME);
        while progress == Progress::Made && left > 0 {
            let _passage = self.step.enter().await;
            self.read_letters();
            self.answer_calls().await;
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

    /// Steps the node until there is nothing to do, a letter to be read, or somebody in line. In the middle of a step
    /// it answers the access that has to wait.
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
                Letter::Open(process, answer) => {
                    // A pid that is 0 is nobody's.
                    let open = |memory: &Replay| machine.open_session(memory, process.0 + 1, 1);
                    answer.give(self.memory.run_at_once(open));
                }
                Letter::Called(service, request, waiting) => {
                    self.calls.borrow_mut().push_back(Called { service, request, waiting });
                }
                Letter::Close(session, said_so) => machine.end_session(session, said_so),
                Letter::AskedDirectly(ask, waiting) => {
                    let ticket = machine.ask(ask, self.entropy());
                    self.asked.borrow_mut().insert(ticket, Asker::Client(waiting));
                }
                Letter::Asked(engine, at, ask) => {
                    let ticket = machine.ask(ask, self.entropy());
                    self.asked.borrow_mut().insert(ticket, Asker::Engine(engine, at));
                }
                Letter::Ended(number, said_so) => machine.end_remote(number, said_so),
            }
        }
    }

    /// Has services answer the callers who have the memory mapped.
    async fn answer_calls(&self) {
        loop {
            let next = self.calls.borrow_mut().pop_front();
            let Some(Called { service, request, waiting }) = next else { return };
            let answered = match addressed(service, &request) {
                Ok((key, asked)) => {
                    let served = self.served(key);
                    match served {
                        Ok(served) => call(&self.memory, &served, key, Rights::ALL, asked).await,
                        Err(refusal) => Err(refusal),
                    }
                }
                Err(refusal) => Err(refusal),
            };
            waiting.give(answered);
        }
    }

    /// The service of the store that this key may open.
    pub(crate) fn served(&self, key: Key) -> Result<Arc<Served<Replay>>, String> {
        let served = self.machine.borrow().served(key.region());
        served.ok_or_else(|| "the key of this call opens no store".to_owned())
    }

    fn hand_out(&self) {
        let mut machine = self.machine.borrow_mut();
        while let Some((ticket, answer)) = machine.answer() {
            self.tell(ticket, answer);
        }
    }

    fn tell(&self, ticket: Ticket, answer: Result<Answer, String>) {
        match self.asked.borrow_mut().remove(&ticket) {
            Some(Asker::Engine(engine, at)) => self.mails[engine].answer(at, answer),
            Some(Asker::Client(waiting)) => waiting.give(answer.map(for_runner)),
            None => {}
        }
    }

    fn entropy(&self) -> [u64; 2] {
        [self.world.random().bits(), self.world.random().bits()]
    }
}

/// An answer to a client that runs its chains itself: it has the key of no store that is wide.
fn for_runner(answer: Answer) -> Answer {
    match answer {
        Answer::Store(store) if store.wide => Answer::Store(Store { secret: 0, ..store }),
        answer => answer,
    }
}

/// What is asked of the node itself.
pub(crate) fn parse(request: &[u8]) -> Result<Ask, String> {
    serde_json::from_slice(request).map_err(|error| format!("the question is not understood: {error}"))
}

/// Has a service answer a call, access by access. Nobody may be in the middle of a step of the node when it begins.
pub(crate) async fn call(
    memory: &Replay,
    served: &Served<Replay>,
    key: Key,
    rights: Rights,
    asked: &[u8],
) -> Result<Vec<u8>, String> {
    let Some(mut attended) = served.try_attend() else {
        return Err("the service is in another's call: call again".to_owned());
    };
    let mut answer = Vec::new();
    let answered = memory.run(|memory| attended.call(memory, key, rights, asked, &mut answer)).await;
    answered.map(|()| answer)
}
