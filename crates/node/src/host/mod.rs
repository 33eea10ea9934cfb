//! The host: connects the node's logic to threads, sockets and processes.
//!
//! One thread steps the node, reads the sockets of shm clients, and watches their processes. It sleeps while there is
//! nothing to do. Clients wake it when they want memory or have retired many buffers. It also polls at intervals, which
//! grow while nothing happens.
//! Invariant: the lock on the node's state is held for a bounded number of steps at a time, and never during a wait.

mod admin;
mod clients;
mod engines;
mod logs;
mod predecessors;
mod process;

pub use admin::Admin;
pub use clients::BindError;

use crate::access::{Access, Guesses, Tokens};
use crate::identity::{Sender, fenced_session};
use crate::node::{Node, NodeMemory, Progress, Ticket};
use crate::served::{Begun, Buffers, Calling, Served, Start, no_store};
use crate::turn::{for_runner, parse};
use clients::Clients;
use engines::{Engine, Letter, Mail, Nic};
use farside_fabrics::local::LocalNode;
use farside_fabrics::memory::{Mapping, Wide};
use farside_fabrics::ring::RingPort;
use farside_fabrics::session::server::RequestRef;
use farside_fabrics::shm::frame;
use farside_fabrics::tcp::TcpPort;
#[cfg(feature = "tls")]
use farside_fabrics::tcp::tls::{Identity, TlsPort};
use farside_fabrics::timer;
use farside_fabrics::udp::UdpPort;
#[cfg(feature = "verbs")]
use farside_fabrics::verbs::{VerbsAddress, VerbsPort};
use farside_remote::arena::session::{Counters, SessionId};
use farside_remote::arena::{SEGMENT_SIZE, SESSIONS_MAX};
use farside_remote::control::{Answer, Ask, NodeInfo, Refusals};
use farside_remote::fabric::ServiceId;
use farside_remote::service::{Kind, addressed};
use farside_remote::{FabricError, Key, Memory, NodeId, Rights};
pub use logs::LogFolder;
use logs::Logs;
use rustix::event::EventfdFlags;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Options of a node.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Path of the socket for shm clients. If there is none, only this process can connect.
    pub socket: Option<PathBuf>,
    /// Kills a client whose process was stopped for this long in the middle of a turn, so that memory can be reclaimed.
    pub evict_stopped_after: Option<Duration>,
    /// Addresses at which engines listen; [`Options::engines`] of them at each.
    pub listen: Vec<Listen>,
    /// Number of engines at each address; 0 means 1.
    pub engines: usize,
    /// How engines wait for requests.
    pub engine_mode: EngineMode,
    /// The tokens that engines accept. Without tokens every client may do everything; this is refused if other machines
    /// can reach an engine. Tokens do not apply to shm clients, which map the whole memory.
    pub tokens: Option<Tokens>,
    /// Lets the NIC of `Listen::Verbs` execute the atomics of all stores. Engines then execute none, and shm clients
    /// open no store: a NIC's atomics and a CPU's are not atomic to each other.
    pub nic_atomics: bool,
    /// Does not seal UDP packets, which are otherwise sealed if there are tokens. Anyone who sees unsealed packets can
    /// read and forge them.
    pub insecure_udp: bool,
    /// Options of the admin server, if one is to run.
    pub admin: Option<Admin>,
    /// The folder of the stores' logs, if kinds that have logs are to have them.
    pub log: Option<LogFolder>,
    /// Takes over a memory that another node served, with its stores.
    pub take_over: bool,
    /// When taking over, kills the old node's clients that are still alive. If false and such clients exist, the start
    /// fails.
    pub evict: bool,
}

/// How engines wait for requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineMode {
    /// After a request, an engine polls for a short time ([`SPIN`](farside_fabrics::spin::SPIN)), then sleeps.
    #[default]
    Poll,
    /// An engine sleeps whenever nothing has arrived, until its socket or its rings have something.
    Event,
}

/// An address at which engines listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// UDP at this address; port 0 means any port.
    Udp(SocketAddr),
    /// TCP at this address; port 0 means any port.
    Tcp(SocketAddr),
    /// TLS over TCP at this address, with this identity of the node; port 0 means any port.
    #[cfg(feature = "tls")]
    Tls(SocketAddr, Identity),
    /// Rings in shared memory, through the unix socket with this path.
    Ring(PathBuf),
    /// RDMA, by this device.
    #[cfg(feature = "verbs")]
    Verbs(VerbsAddress),
}

impl Listen {
    /// Whether other machines can reach the address.
    fn is_open(&self) -> bool {
        let is_open = |address: &SocketAddr| !address.ip().to_canonical().is_loopback();
        match self {
            Listen::Udp(address) | Listen::Tcp(address) => is_open(address),
            #[cfg(feature = "tls")]
            Listen::Tls(address, _) => is_open(address),
            Listen::Ring(_) => false,
            #[cfg(feature = "verbs")]
            Listen::Verbs(address) => address.is_open(),
        }
    }

    /// Name of the RDMA device that is listened at, if it is one; empty if none was named.
    fn device(&self) -> Option<&str> {
        match self {
            #[cfg(feature = "verbs")]
            Listen::Verbs(address) => Some(address.choice.device.as_deref().unwrap_or_default()),
            _ => None,
        }
    }
}

impl std::fmt::Display for Listen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Listen::Udp(address) => write!(f, "udp://{address}"),
            Listen::Tcp(address) => write!(f, "tcp://{address}"),
            #[cfg(feature = "tls")]
            Listen::Tls(address, _) => write!(f, "tls://{address}"),
            Listen::Ring(path) => write!(f, "ring:{}", path.display()),
            #[cfg(feature = "verbs")]
            Listen::Verbs(address) => address.fmt(f),
        }
    }
}

/// A running node: its threads and sockets.
pub struct Host {
    shared: Arc<Shared>,
    engines: Mutex<Vec<Engine>>,
    listening: Vec<Listen>,
    admin: Mutex<Option<admin::Server>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    memory: Arc<Mapping>,
    /// The same memory as wide memory, on which all engines run the chains of wide regions.
    wide: Wide<Arc<Mapping>>,
    state: Mutex<State>,
    /// Signalled when a response for a caller in this process has arrived.
    answered: Condvar,
    /// Eventfd that wakes the node's thread; rung only by this process.
    bell: OwnedFd,
    stop: AtomicBool,
    /// Mailbox of each engine, by the engine's index.
    mails: Vec<Arc<Mail>>,
    /// Letters from engines. The lock is held only to add a letter or to take all letters.
    letters: Mutex<Vec<Letter>>,
    engine_mode: EngineMode,
    /// Access of each engine's clients to the memory by the NIC.
    #[cfg_attr(not(feature = "verbs"), allow(dead_code, reason = "there is none"))]
    nics: Vec<Nic>,
    /// Whether the NIC executes the atomics of all stores.
    nic_atomics: bool,
    /// The current access rules. A reload replaces the rules; each engine then reads the new ones by itself.
    access: Mutex<Arc<Access>>,
    /// Whether calls of shm clients wait for records to be stored, and whether some may be stored since the node's
    /// thread last looked.
    waits_for_log: AtomicBool,
    has_stored: AtomicBool,
    /// Place of the logs, if the node has logs.
    logs: Option<Logs>,
    /// Recent wrong tokens and keys at all engines.
    guesses: Mutex<Guesses>,
    /// Time from which the clock for `guesses` counts.
    began: Instant,
}

struct State {
    node: Node<Mapping>,
    /// Responses for callers in this process that they have not fetched yet.
    answers: BTreeMap<Ticket, Result<Answer, String>>,
    /// Tickets of the outstanding requests of callers in this process.
    callers: Vec<Ticket>,
    /// Engine and request at that engine, for each outstanding request of a remote session.
    remote: BTreeMap<Ticket, (usize, RequestRef)>,
    /// Pids of the stopped processes that delay reclamation, as last seen.
    stopped: Vec<u32>,
    /// Calls of shm clients whose records are not stored yet, by their tickets, which begin with [`CALLS`].
    pending: BTreeMap<Ticket, Unstored>,
    next_call: u64,
}

/// A call whose records are not stored yet, with its service.
type Unstored = (Arc<Served<Mapping>>, Begun);

/// Bit of the tickets of calls to services, which no ticket of the node has.
const CALLS: Ticket = 1 << 63;

impl NodeMemory for Mapping {
    fn discard(&self, index: u32) -> Result<(), Self::Wait> {
        let at = self.geometry().segment_at(index);
        if Mapping::discard(self, at, SEGMENT_SIZE).is_err() {
            // The kind of file that backs the memory does not support holes: write zeros instead.
            static ZEROS: [u8; 64 * 1024] = [0; 64 * 1024];
            for offset in (0..SEGMENT_SIZE).step_by(ZEROS.len()) {
                self.write(at + offset, &ZEROS)?;
            }
        }
        Ok(())
    }
}

/// Number of steps after which the sockets are polled again.
const STEPS_AT_A_TIME: u32 = 4096;
/// Maximum time after which the sockets are polled again. It is checked every few steps, since a step that prepares
/// memory takes much longer than other steps.
const STEPPING_MAX: Duration = Duration::from_millis(5);
const STEPS_PER_LOOK: u32 = 4;
const LOOK_FIRST: Duration = Duration::from_millis(1);
const LOOK_LAST: Duration = Duration::from_millis(100);

impl Host {
    /// Starts a node that supports these kinds of stores, on fresh memory, or on memory that another node served.
    ///
    /// # Errors
    /// The socket or an address cannot be served, the memory cannot be taken over, or the system refuses a resource.
    /// Nothing is left behind.
    pub fn start(
        memory: Mapping,
        kinds: Vec<Box<dyn Kind<Mapping>>>,
        options: Options,
    ) -> Result<Host, BindError> {
        let memory = Arc::new(memory);
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| BindError::System("create an eventfd", errno.into()))?;
        check_listening(&options)?;
        let is_sealed = options.tokens.is_some() && !options.insecure_udp;
        let (ports, listening) = ports(&options)?;
        if ports.iter().any(|port| port.nic().is_some()) {
            // Before any memory is registered with the NIC, which would go on using pages that were given back.
            memory.keep_pages();
        }
        let info = NodeInfo {
            listening: listening.iter().map(Listen::to_string).collect(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            incarnation: memory.incarnation(),
            memory_bytes: memory.geometry().size(),
            page_size: memory.page_size().0,
            ..NodeInfo::default()
        };
        let mut node = if options.take_over {
            predecessors::ensure_no_old_clients(&memory, options.evict)?;
            let Ok(restored) = Node::restore(&*memory, kinds, info);
            let mut node = restored.map_err(BindError::TakeOver)?;
            while let Ok(recovered) = node.recover_step(&memory)
                && !recovered.map_err(BindError::TakeOver)?
            {}
            node
        } else {
            Node::new(&*memory, kinds, info)
        };
        let mut random = Randomness::new();
        node.set_seeds(Box::new(move || random.next()));
        let logs = match &options.log {
            Some(log) => Some(Logs::recover(log, &mut node, &memory)?),
            None => {
                let Ok(left) = node.leave_logs(&memory);
                left.map_err(BindError::TakeOver)?;
                None
            }
        };
        predecessors::note_boot(&memory);
        let state = State {
            node,
            answers: BTreeMap::new(),
            callers: Vec::new(),
            remote: BTreeMap::new(),
            stopped: Vec::new(),
            pending: BTreeMap::new(),
            next_call: 0,
        };
        let mails: Result<Vec<_>, _> = ports.iter().map(|_| Mail::new().map(Arc::new)).collect();
        let mails = mails.map_err(|errno| BindError::System("create an eventfd", errno.into()))?;
        let nic_atomics = options.nic_atomics;
        let shared = Arc::new(Shared {
            nics: ports.iter().filter_map(AnyPort::nic).collect(),
            nic_atomics,
            wide: Wide::of(Arc::clone(&memory)),
            memory,
            state: Mutex::new(state),
            answered: Condvar::new(),
            bell,
            stop: AtomicBool::new(false),
            mails,
            letters: Mutex::default(),
            engine_mode: options.engine_mode,
            access: Mutex::new(Arc::new(Access::new(options.tokens.clone()))),
            waits_for_log: AtomicBool::new(false),
            has_stored: AtomicBool::new(false),
            logs,
            guesses: Mutex::default(),
            began: Instant::now(),
        });
        let admin = options.admin.as_ref().map(|admin| admin::Server::start(Arc::clone(&shared), admin));
        let admin = Mutex::new(admin.transpose()?);
        let clients = Clients::new(&shared.bell, options)?;
        let tended = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("farside-node".into())
            .spawn(move || tended.tend(clients))
            .map_err(|error| BindError::System("start a thread", error))?;
        let mut host =
            Host { shared, engines: Mutex::default(), listening, admin, thread: Mutex::new(Some(thread)) };
        host.start_engines(ports, is_sealed)?;
        Ok(host)
    }

    fn start_engines(&mut self, ports: Vec<AnyPort>, is_sealed: bool) -> Result<(), BindError> {
        let pid = std::process::id();
        let start_time = process::start_time(pid);
        for (index, port) in ports.into_iter().enumerate() {
            let session = self.shared.open_engine(pid, start_time).map_err(BindError::Engine)?;
            let nic = port.nic();
            let started = match port {
                AnyPort::Udp(port) if is_sealed => {
                    let shared = Arc::clone(&self.shared);
                    let port = port.sealed_by(Box::new(move |name| shared.access().shared(name)));
                    Engine::start(&self.shared, index, session, port, nic)
                }
                AnyPort::Udp(port) => Engine::start(&self.shared, index, session, port, nic),
                AnyPort::Tcp(port) => Engine::start(&self.shared, index, session, port, nic),
                #[cfg(feature = "tls")]
                AnyPort::Tls(port) => Engine::start(&self.shared, index, session, port, nic),
                AnyPort::Ring(port) => Engine::start(&self.shared, index, session, port, nic),
                #[cfg(feature = "verbs")]
                AnyPort::Verbs(port, _) => Engine::start(&self.shared, index, session, *port, nic),
            };
            let engine = started.map_err(|error| BindError::System("start an engine", error))?;
            self.engines.get_mut().unwrap_or_else(PoisonError::into_inner).push(engine);
        }
        Ok(())
    }

    /// Addresses at which engines listen, with their actual ports.
    pub fn listening(&self) -> &[Listen] {
        &self.listening
    }

    /// Replaces the tokens that engines accept. Sessions whose token is not among the new ones end. A session's
    /// requests are judged by its token's new rights from the next round of the session's engine on.
    pub fn set_tokens(&self, tokens: Tokens) {
        *self.shared.access.lock().unwrap_or_else(PoisonError::into_inner) =
            Arc::new(Access::new(Some(tokens)));
        self.shared.mails.iter().for_each(|mail| mail.renew_access());
    }

    /// The node's memory.
    pub fn memory(&self) -> &Arc<Mapping> {
        &self.shared.memory
    }

    /// Sends a request to the node, and waits for the response.
    ///
    /// # Errors
    /// The node refused the request, or did not respond within `deadline`; in the latter case the request may yet be
    /// carried out.
    pub fn ask(&self, ask: Ask, deadline: Duration) -> Result<Answer, FabricError> {
        self.shared.ask(Sender::Host, ask, deadline)
    }

    /// The sum of the counters of all sessions, including closed ones.
    pub fn counters(&self) -> Counters {
        let Ok(counters) = self.shared.state().node.counters(&self.shared.memory);
        counters
    }

    /// The processes that are stopped in the middle of a turn, and so delay reclamation.
    pub fn stopped_pids(&self) -> Vec<u32> {
        self.shared.state().stopped.clone()
    }

    /// Stops serving: responds to outstanding requests, closes the socket, and ends the node's thread. Clients that are
    /// still connected see the node as dead.
    pub fn stop(&self) {
        drop(self.admin.lock().unwrap_or_else(PoisonError::into_inner).take());
        drop(std::mem::take(&mut *self.engines.lock().unwrap_or_else(PoisonError::into_inner)));
        self.shared.stop.store(true, Ordering::Release);
        frame::ring(&self.shared.bell);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            drop(thread.join());
        }
        if let Some(logs) = &self.shared.logs {
            logs.stop();
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The access rules that currently apply.
    fn access(&self) -> Arc<Access> {
        Arc::clone(&self.access.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn guesses(&self) -> MutexGuard<'_, Guesses> {
        self.guesses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the sum of all engines' counts of refusals.
    fn refusals(&self) -> Refusals {
        let mut sum = Refusals::default();
        self.mails.iter().for_each(|mail| sum.add(&mail.counted().refusals));
        sum
    }

    /// Checks that a client that runs its own chains may send this request.
    ///
    /// # Errors
    /// The request opens a wide store, whose locks such a client would not take; or the NIC executes the atomics of all
    /// stores.
    fn check_runner(&self, ask: &Ask) -> Result<(), String> {
        if self.nic_atomics
            && let Ask::OpenStore { name } = ask
        {
            return Err(format!(
                "this node's NIC executes the atomics of its stores (--nic-atomics), so only clients over verbs may \
                 open '{name}'"
            ));
        }
        if let Ask::OpenStore { name } = ask
            && let Ok(entry) = self.state().node.catalog().get(name)
            && entry.store.wide
        {
            return Err(format!(
                "the store '{name}' is wide, so only engines may run its chains: open it over ring, udp or tcp"
            ));
        }
        Ok(())
    }

    /// Calls a store's service in this thread, for a caller that has the memory mapped. If the call's records are not
    /// stored yet, returns the call, which [`Shared::end_call`] ends.
    ///
    /// # Errors
    /// The service refused the call, or the store is missing.
    fn call(
        &self,
        session: SessionId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<Option<Unstored>, String> {
        let (key, request) = addressed(service, request)?;
        let served = self.served(key)?;
        let calling = Calling { key, rights: Rights::ALL, session: Some(session.number), request };
        let begun = served.serve(&self.memory, start_now, calling, &mut Buffers::default(), answer)?;
        Ok(begun.map(|begun| (served, begun)))
    }

    /// Ends a call whose records have this outcome.
    fn end_call(
        &self,
        served: &Served<Mapping>,
        begun: &Begun,
        stored: &Result<(), String>,
        answer: &mut Vec<u8>,
    ) -> Result<(), String> {
        served.finish(&self.memory, start_now(), (begun, stored), &mut Buffers::default(), answer)
    }

    /// Ends the calls of shm clients whose records are stored, or could not be, and responds to them.
    fn end_calls(&self, state: &mut State, clients: &mut Clients) {
        if !self.has_stored.swap(false, Ordering::SeqCst) {
            return;
        }
        let pending = std::mem::take(&mut state.pending);
        for (ticket, (served, begun)) in pending {
            match served.outcome(&begun) {
                Some(stored) => {
                    let mut answer = Vec::new();
                    let ended = self.end_call(&served, &begun, &stored, &mut answer);
                    clients.answer_call(ticket, ended.map(|()| answer));
                }
                None => drop(state.pending.insert(ticket, (served, begun))),
            }
        }
        self.waits_for_log.store(!state.pending.is_empty(), Ordering::SeqCst);
    }

    /// Tells everyone who waits for records that some may be stored now.
    fn note_stored(&self) {
        self.mails.iter().for_each(|mail| mail.note_stored());
        if self.waits_for_log.load(Ordering::SeqCst) {
            self.has_stored.store(true, Ordering::SeqCst);
            frame::ring(&self.bell);
        }
    }

    /// The service of the store that this key opens.
    fn served(&self, key: Key) -> Result<Arc<Served<Mapping>>, String> {
        self.state().node.served(key.region()).ok_or_else(|| no_store(key))
    }

    /// The main function of the node's thread.
    fn tend(self: &Arc<Self>, mut clients: Clients) {
        let mut pause = LOOK_FIRST;
        let mut last_look = Instant::now();
        loop {
            let busy = self.step(&mut clients);
            let stopping = self.stop.load(Ordering::Acquire);
            if stopping && !busy {
                clients.close();
                return;
            }
            let wait = if busy {
                Duration::ZERO
            } else {
                self.until_timer().map_or(pause, |until| pause.min(until))
            };
            self.memory.set_node_sleeps(!busy);
            let rung = clients.wait(wait, |event| self.on_client(event));
            self.memory.set_node_sleeps(false);
            let due = last_look.elapsed() >= pause;
            if rung || due {
                last_look = Instant::now();
                self.poll_shared(&mut clients);
            }
            pause = if busy || rung {
                LOOK_FIRST
            } else if due {
                (pause * 2).min(LOOK_LAST)
            } else {
                pause
            };
        }
    }

    /// The time that remains until a service's background work is due, if any has asked for a time.
    fn until_timer(&self) -> Option<Duration> {
        let time = self.state().node.next_timer()?;
        let left = time.saturating_sub(timer::now());
        // A step whose time has passed waits for a call.
        Some(if left.is_zero() { LOOK_FIRST } else { left })
    }

    /// Sends a letter from an engine to the node's thread.
    fn post(&self, letter: Letter) {
        self.letters.lock().unwrap_or_else(PoisonError::into_inner).push(letter);
        frame::ring(&self.bell);
    }

    fn read_letters(&self, state: &mut State) {
        let letters = std::mem::take(&mut *self.letters.lock().unwrap_or_else(PoisonError::into_inner));
        for letter in letters {
            match letter {
                Letter::Asked { engine, number, at, ask } => {
                    let ticket = accept(&mut state.node, Sender::Remote { engine, number }, ask);
                    state.remote.insert(ticket, (engine, at));
                }
                Letter::Ended { number, is_clean } => state.node.end_remote(number, is_clean),
            }
        }
    }

    /// Steps the node for a while and delivers responses. Returns true if more steps have work to do.
    fn step(self: &Arc<Self>, clients: &mut Clients) -> bool {
        let mut state = self.state();
        self.read_letters(&mut state);
        self.end_calls(&mut state, clients);
        state.node.set_now(timer::now());
        let mut busy = false;
        let began = Instant::now();
        for made in 1..=STEPS_AT_A_TIME {
            self.drop_registrations();
            let Ok(progress) = state.node.step(&self.memory);
            busy = progress == Progress::Made;
            if !busy || made.is_multiple_of(STEPS_PER_LOOK) && began.elapsed() >= STEPPING_MAX {
                break;
            }
        }
        for log in state.node.take_new_logs() {
            self.start_writer(log);
        }
        while let Some((engine, number)) = state.node.ending() {
            self.mails[engine].end_fenced(number);
        }
        while let Some((ticket, mut answer)) = state.node.answer() {
            if let Ok(Answer::NodeInfo(info)) = &mut answer {
                info.refusals = self.refusals();
                let Ok(counted) = state.node.counters(&self.memory);
                info.traffic = Some(counted.into());
            }
            if let Some(place) = state.callers.iter().position(|&caller| caller == ticket) {
                state.callers.swap_remove(place);
                state.answers.insert(ticket, answer);
                self.answered.notify_all();
            } else if let Some((engine, request)) = state.remote.remove(&ticket) {
                self.mails[engine].answer(request, answer);
            } else {
                clients.answer(ticket, answer.map(for_runner));
            }
        }
        busy
    }

    /// Drops the NIC's registrations of regions whose keys are not valid any more. This happens before the node's next
    /// step, so before a grace period that began with the revocation can end.
    fn drop_registrations(&self) {
        #[cfg(feature = "verbs")]
        self.nics.iter().for_each(|nic| nic.retain());
    }

    fn poll_shared(&self, clients: &mut Clients) {
        let mut state = self.state();
        state.node.poll_shared();
        let delaying = state.node.delayed_by();
        state.stopped = clients.watch_stopped(&delaying);
        let State { node, stopped, .. } = &mut *state;
        node.report_stopped(stopped);
        node.grow_crowded(entropy);
    }

    /// Handles an event of a client's socket or process.
    fn on_client(&self, event: clients::Event) -> clients::Reaction {
        use clients::{Event, Reaction};
        match event {
            Event::Greeted { pid } => match self.open_session(pid, process::start_time(pid)) {
                Ok(session) => Reaction::Welcome {
                    session,
                    incarnation: self.memory.incarnation(),
                    memory: Arc::clone(&self.memory),
                },
                Err(reason) => Reaction::Refuse(reason),
            },
            Event::Asked { session, service, request } if service != ServiceId::NODE => {
                if self.state().node.is_fenced(Sender::Slot(session)) {
                    return Reaction::Refuse(fenced_session());
                }
                let mut answer = Vec::new();
                match self.call(session, service, &request, &mut answer) {
                    Ok(None) => Reaction::Answer(Ok(answer)),
                    Ok(Some((served, begun))) => {
                        let mut state = self.state();
                        state.next_call += 1;
                        let ticket = CALLS | state.next_call;
                        state.pending.insert(ticket, (served, begun));
                        // SeqCst: pairs with the load in `note_stored`. The next step looks for what is stored by now.
                        self.waits_for_log.store(true, Ordering::SeqCst);
                        self.has_stored.store(true, Ordering::SeqCst);
                        frame::ring(&self.bell);
                        Reaction::Wait(ticket)
                    }
                    Err(refusal) => Reaction::Answer(Err(refusal)),
                }
            }
            Event::Asked { session, request, .. } => {
                let ask = parse(&request).and_then(|ask| self.check_runner(&ask).map(|()| ask));
                match ask {
                    Ok(ask) => Reaction::Wait(accept(&mut self.state().node, Sender::Slot(session), ask)),
                    Err(refusal) => Reaction::Refuse(refusal),
                }
            }
            Event::Ended { session, is_clean } => {
                self.state().node.end_session(session, is_clean);
                Reaction::Nothing
            }
            Event::Left { tickets } => {
                self.state().node.cancel(&tickets);
                Reaction::Nothing
            }
        }
    }

    /// Opens a session for a process with this start time, if known.
    fn open_session(&self, pid: u32, start_time: Option<u64>) -> Result<SessionId, String> {
        let start_time = known(pid, start_time)?;
        let Ok(opened) = self.state().node.open_session(&self.memory, pid, start_time);
        opened.ok_or_else(too_many_sessions)
    }

    fn open_engine(&self, pid: u32, start_time: Option<u64>) -> Result<SessionId, String> {
        let start_time = known(pid, start_time)?;
        let Ok(opened) = self.state().node.open_engine(&self.memory, pid, start_time);
        opened.ok_or_else(too_many_sessions)
    }

    fn ask(&self, sender: Sender, ask: Ask, deadline: Duration) -> Result<Answer, FabricError> {
        let since = Instant::now();
        let mut state = self.state();
        let ticket = accept(&mut state.node, sender, ask);
        state.callers.push(ticket);
        frame::ring(&self.bell);
        loop {
            if let Some(answer) = state.answers.remove(&ticket) {
                return answer.map_err(FabricError::Refused);
            }
            let left = deadline.saturating_sub(since.elapsed());
            if left.is_zero() {
                state.callers.retain(|&caller| caller != ticket);
                state.node.cancel(&BTreeSet::from([ticket]));
                return Err(FabricError::Deadline { node: NodeId(0), waited: deadline });
            }
            let waited = self.answered.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl LocalNode for Host {
    fn memory(&self) -> &Arc<Mapping> {
        &self.shared.memory
    }

    fn open_session(&self) -> Result<SessionId, FabricError> {
        let pid = std::process::id();
        self.shared.open_session(pid, process::start_time(pid)).map_err(FabricError::Refused)
    }

    fn close_session(&self, session: SessionId) {
        self.shared.state().node.end_session(session, true);
        frame::ring(&self.shared.bell);
    }

    fn call(
        &self,
        session: SessionId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        if service != ServiceId::NODE {
            let called = self.shared.call(session, service, request, answer).map_err(FabricError::Refused)?;
            let Some((served, begun)) = called else { return Ok(()) };
            let stored = served.log().map_or(Ok(()), |log| log.wait_for(begun.position));
            return self.shared.end_call(&served, &begun, &stored, answer).map_err(FabricError::Refused);
        }
        let ask = parse(request).map_err(FabricError::Refused)?;
        self.shared.check_runner(&ask).map_err(FabricError::Refused)?;
        let patience = ask.patience();
        let answered = for_runner(self.shared.ask(Sender::Slot(session), ask, patience)?);
        answer.clear();
        answer.extend_from_slice(&serde_json::to_vec(&answered).expect("plain data"));
        Ok(())
    }

    fn ring(&self) {
        if self.shared.memory.node_sleeps() {
            frame::ring(&self.shared.bell);
        }
    }
}

/// Checks that it is safe to listen at the requested addresses. Warns if traffic there is readable by others.
fn check_listening(options: &Options) -> Result<(), BindError> {
    if options.nic_atomics {
        check_nic_atomics(options)?;
    }
    for listen in options.listen.iter().filter(|listen| listen.is_open()) {
        if options.tokens.is_none() {
            return Err(BindError::NoTokens(listen.to_string()));
        }
        if matches!(listen, Listen::Udp(_)) && options.insecure_udp {
            tracing::warn!(
                "{listen} is open to other machines and its packets are not sealed: anyone who can see them can read \
                 them, tokens included, and forge them; leave out --insecure-udp unless you trust the whole network"
            );
        }
        #[cfg(feature = "verbs")]
        if matches!(listen, Listen::Verbs(_)) {
            tracing::warn!(
                "{listen} is open to other machines and nothing is encrypted: anyone who sees the traffic can read it, \
                 tokens included, and forge it; use verbs only where you trust the whole network"
            );
        }
        if matches!(listen, Listen::Tcp(_)) {
            tracing::warn!(
                "{listen} is open to other machines and nothing is encrypted: anyone who sees the traffic can read it, \
                 tokens included; use tls unless you trust the whole network"
            );
        }
    }
    Ok(())
}

/// Checks that all atomics of the node are executed by one NIC.
fn check_nic_atomics(options: &Options) -> Result<(), BindError> {
    let mut devices = options.listen.iter().filter_map(|listen| Some((listen, listen.device()?)));
    let Some((_, first)) = devices.next() else {
        let reason = "--nic-atomics needs a --listen verbs://DEVICE, whose NIC executes the atomics";
        return Err(BindError::Listen("verbs://".into(), std::io::Error::other(reason)));
    };
    match devices.find(|(_, device)| *device != first) {
        None => Ok(()),
        Some((listen, _)) => {
            let reason = "with --nic-atomics, all verbs:// of a node must be of one device: the atomics of two devices \
                          are not atomic to each other";
            Err(BindError::Listen(listen.to_string(), std::io::Error::other(reason)))
        }
    }
}

fn known(pid: u32, start_time: Option<u64>) -> Result<u64, String> {
    // Without the start time, a node that takes over would assume that the process has exited, and reuse memory that
    // the process may still access.
    start_time.ok_or_else(|| {
        format!(
            "the node cannot read /proc/{pid}/stat for your process's start time: mount /proc where the node runs"
        )
    })
}

/// A port of one of the remote fabrics.
enum AnyPort {
    Udp(UdpPort),
    Tcp(TcpPort),
    #[cfg(feature = "tls")]
    Tls(TlsPort),
    Ring(RingPort),
    #[cfg(feature = "verbs")]
    Verbs(Box<VerbsPort>, Option<Nic>),
}

impl AnyPort {
    /// What gives the port's clients access to memory by the NIC.
    fn nic(&self) -> Option<Nic> {
        match self {
            #[cfg(feature = "verbs")]
            AnyPort::Verbs(_, nic) => nic.clone(),
            _ => None,
        }
    }
}

/// Binds a port for every engine. Returns the ports and the addresses where they listen.
fn ports(options: &Options) -> Result<(Vec<AnyPort>, Vec<Listen>), BindError> {
    let (mut ports, mut listening) = (Vec::new(), Vec::new());
    let engines = options.engines.max(1);
    for listen in &options.listen {
        let refused = |error| BindError::Listen(listen.to_string(), error);
        match listen {
            Listen::Udp(address) => {
                for port in UdpPort::bind(*address, engines).map_err(refused)? {
                    listening.push(Listen::Udp(port.address().map_err(refused)?));
                    ports.push(AnyPort::Udp(port));
                }
            }
            Listen::Tcp(address) => {
                for port in TcpPort::bind(*address, engines).map_err(refused)? {
                    listening.push(Listen::Tcp(port.address().map_err(refused)?));
                    ports.push(AnyPort::Tcp(port));
                }
            }
            #[cfg(feature = "tls")]
            Listen::Tls(address, identity) => {
                for port in TlsPort::bind(*address, engines, identity).map_err(refused)? {
                    listening.push(Listen::Tls(port.address().map_err(refused)?, identity.clone()));
                    ports.push(AnyPort::Tls(port));
                }
            }
            Listen::Ring(path) => {
                let bound = RingPort::bind(path, engines);
                let bound = bound.map_err(|error| refused(std::io::Error::other(error)))?;
                ports.extend(bound.into_iter().map(AnyPort::Ring));
                listening.push(Listen::Ring(std::path::absolute(path).map_err(refused)?));
            }
            #[cfg(feature = "verbs")]
            Listen::Verbs(at) => {
                let at = VerbsAddress { nic_atomics: options.nic_atomics, ..at.clone() };
                let failed = |error| refused(std::io::Error::other(error));
                for port in VerbsPort::bind(&at, engines).map_err(failed)? {
                    let bound = port.address().map_err(refused)?;
                    let (address, number) = (Some(bound.ip()), bound.port());
                    listening.push(Listen::Verbs(VerbsAddress { address, port: number, ..at.clone() }));
                    let nic = port.grants().map_err(failed)?.map(Arc::new);
                    ports.push(AnyPort::Verbs(Box::new(port), nic));
                }
            }
        }
    }
    listening.dedup();
    Ok((ports, listening))
}

/// The segments of a region, as runs of adjacent ones: the address and the number of bytes of each.
#[cfg(feature = "verbs")]
fn runs_of(memory: &Mapping, region: u32) -> Vec<(u64, u64)> {
    let geometry = memory.geometry();
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for index in 0..geometry.segments() {
        let Ok(segment) = memory.arena().segment(index);
        if segment.region != region {
            continue;
        }
        let at = geometry.segment_at(index);
        match runs.last_mut() {
            Some((start, len)) if *start + *len == at => *len += SEGMENT_SIZE,
            _ => runs.push((at, SEGMENT_SIZE)),
        }
    }
    runs
}

fn too_many_sessions() -> String {
    format!("the node has {SESSIONS_MAX} sessions, the maximum: end another client first")
}

/// Passes a request to the node, with the time of its arrival.
fn accept(node: &mut Node<Mapping>, sender: Sender, ask: Ask) -> Ticket {
    node.set_wall(u64::try_from(timer::wall().as_micros()).unwrap_or(u64::MAX));
    node.ask_from(sender, ask, entropy())
}

/// Random numbers of the system, many of which are drawn at a time, so that one costs little.
struct Randomness {
    bytes: Box<[u8; Randomness::AT_ONCE]>,
    /// Number of bytes that are not handed out yet.
    left: usize,
}

impl Randomness {
    const AT_ONCE: usize = 2048;

    fn new() -> Randomness {
        Randomness { bytes: Box::new([0; Randomness::AT_ONCE]), left: 0 }
    }

    /// The next number.
    fn next(&mut self) -> u64 {
        if self.left == 0 {
            fill_with_entropy(&mut self.bytes[..]);
            self.left = Randomness::AT_ONCE;
        }
        self.left -= size_of::<u64>();
        let word = &mut self.bytes[self.left..][..size_of::<u64>()];
        let number = u64::from_le_bytes((&*word).try_into().expect("eight bytes"));
        word.fill(0); // What was handed out is kept nowhere.
        number
    }
}

/// The context's parts of a piece of work that begins now.
fn start_now() -> Start {
    Start { now: timer::coarse_now(), seed: entropy()[0] }
}

/// Draws 128 random bits from the system.
fn entropy() -> [u64; 2] {
    let mut bytes = [0; 16];
    fill_with_entropy(&mut bytes);
    let bits = u128::from_le_bytes(bytes);
    [bits as u64, (bits >> 64) as u64]
}

fn fill_with_entropy(bytes: &mut [u8]) {
    let mut filled = 0;
    while filled < bytes.len() {
        // A long request may be interrupted by a signal.
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(more) => filled += more,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => {
                panic!("the system must supply random bytes, so that keys cannot be guessed: {errno}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farside_fabrics::memory::Pages;

    #[test]
    fn random_numbers_of_the_system_differ_and_are_not_kept() {
        let mut random = Randomness::new();
        let drawn: BTreeSet<u64> = (0..10_000).map(|_| random.next()).collect();
        assert_eq!(drawn.len(), 10_000);
        assert!(
            random.left < Randomness::AT_ONCE && random.bytes[random.left..].iter().all(|&byte| byte == 0)
        );
    }

    #[test]
    fn a_process_with_an_unknown_start_time_gets_no_session() {
        let memory = Mapping::create(8 << 20, Pages::Small).expect("memory");
        let host = Host::start(memory, Vec::new(), Options::default()).expect("it serves");
        let refusal =
            host.shared.open_session(1, None).expect_err("a successor could not know whether it is alive");
        assert!(refusal.contains("mount /proc"), "{refusal}");
        host.shared.open_session(1, Some(7)).expect("a session");
    }
}
