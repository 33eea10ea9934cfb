//! A pool of nodes as one fabric: one session per node, all on one client core.
//!
//! The core polls and sleeps on all sessions together. When a session is over, requests to its node fail at once, and a
//! thread opens another session, with growing and randomly varied pauses between attempts, so that no task waits for
//! it. Requests go to the new session from the end of the round in which it was opened.
//!
//! A client that binds its session with a node to a nonce ([`Ask::Bind`]) is bound over the next session, too: the
//! thread that opens that session repeats the request before the pool uses the session. Over `shm`, the key of a store
//! outlives a restart of the node, so an unbound session would run the chains of a client that was fenced meanwhile. If
//! the node refuses the nonce as fenced, the pool opens no further session with that node.
//!
//! Invariant: a request is sent over one session only, except a binding. No other request is repeated over the next
//! one.
//! Invariant: a session carries no request before all bindings of the sessions before it are repeated.
//! Invariant: the end of one node's session changes nothing for requests to other nodes.

use crate::executor::{FDS_MAX, Idle, Turns, block_on};
use crate::mutants;
use crate::spin::Waiting;
use crate::timer;
use crate::wait::{Waits, wait};
use farside_remote::arena::session::Counters;
use farside_remote::clock::Clock;
use farside_remote::control::{Answer, Ask, Store};
use farside_remote::draws::Draws;
use farside_remote::fabric::{FENCED, Ran, ServiceId};
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

/// Maximum number of nodes in a pool: a core sleeps on one descriptor for each.
pub const NODES_MAX: usize = FDS_MAX;

/// Pause after the first failed attempt to open a session. Each further pause is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
/// Longest pause between two attempts, before random variation.
const LONGEST_PAUSE: Duration = Duration::from_millis(400);
/// Random variation of a pause, in percent of its length, up or down.
const VARIATION: u64 = 25;
/// Maximum time to sleep while a session is being opened.
const SLEEP_WHILE_OPENING: Duration = Duration::from_millis(20);
/// Maximum time to sleep while all nodes have sessions. Nothing wakes a core with idle tasks when a node dies whose
/// memory it has mapped, and no other node takes over that memory before the session is dropped.
const SLEEP_MAX: Duration = Duration::from_millis(500);

/// A session with one node, as part of a pool.
#[allow(async_fn_in_trait, reason = "a session belongs to one thread: no Send bound is wanted")]
pub trait Session: Fabric + Waits + Send + 'static {
    /// Whether the session is over: all further requests fail.
    fn is_over(&self) -> bool;

    /// Sets the time after which a call without a response times out.
    fn set_call_timeout(&self, patience: Duration);

    /// The counters of this session.
    fn counters(&self) -> Counters;

    /// Drives the session under a foreign executor. Never completes.
    async fn drive(&self);
}

/// Opens a session with a node of the pool. May block for about 1 s. The error is the reason for a message.
pub type Open<S> = dyn Fn(NodeId) -> Result<S, String> + Send + Sync;

/// A pool of nodes. Belongs to one thread.
pub struct Nodes<S: Session> {
    members: Box<[Member<S>]>,
    /// The sessions of all members that have one.
    live: RefCell<Vec<Rc<S>>>,
    open: Arc<Open<S>>,
    driver: RefCell<Option<Waker>>,
    waiting: Cell<Waiting>,
    news: News,
    /// Timeout of calls, if it was set. Each new session gets it.
    call_timeout: Cell<Option<Duration>>,
    /// Sum of the counters of the sessions that have ended.
    counted: Cell<Counters>,
    /// Number of nodes that have fenced this client.
    fenced: Cell<usize>,
}

/// A node of the pool.
struct Member<S> {
    node: NodeId,
    state: RefCell<State<S>>,
    /// Number of sessions with the node so far.
    sessions: Cell<u64>,
    /// Capabilities of the last session.
    capabilities: Cell<Capabilities>,
    /// Bindings of the session. Each further session gets them, too.
    bindings: RefCell<Vec<Binding>>,
}

/// A binding of this client to a nonce of a store.
#[derive(Clone)]
struct Binding {
    /// Name and id of the store. A session has one nonce per store.
    store: (String, u64),
    /// The request, as the client has sent it.
    request: Vec<u8>,
}

impl Binding {
    /// Returns the binding that this request makes; `None` if it is another request.
    fn of(service: ServiceId, request: &[u8]) -> Option<Binding> {
        if service != ServiceId::NODE {
            return None;
        }
        match serde_json::from_slice(request) {
            Ok(Ask::Bind { name, id, .. }) => Some(Binding { store: (name, id), request: request.to_vec() }),
            _ => None,
        }
    }
}

enum State<S> {
    Up(Rc<S>),
    /// There is no session.
    Down {
        /// Why the last session ended or could not be opened.
        reason: String,
        /// The thread that opens another; none if the thread could not be started.
        opening: Option<Arc<Opening<S>>>,
    },
    /// The node has fenced this client, so there will be no session.
    Fenced,
}

/// The future that drives a session.
type Drive = Pin<Box<dyn Future<Output = ()>>>;

/// What the pool and the thread that opens a session share.
struct Opening<S> {
    progress: Mutex<Progress<S>>,
    stopped: Condvar,
}

struct Progress<S> {
    /// The session, with the bindings that it has.
    opened: Option<(S, Vec<Binding>)>,
    /// Whether the node has refused a binding, since the client is fenced. The thread has ended then.
    is_fenced: bool,
    /// Why the last attempt failed.
    failure: Option<String>,
    /// Set when the pool no longer wants the session.
    is_stopped: bool,
    /// Woken once the session is open.
    driver: Option<Waker>,
}

/// Whether a thread has opened a session since the pool last looked. All such threads of a pool share it.
type News = Arc<AtomicBool>;

impl<S: Session> Nodes<S> {
    /// Opens a session with each of `count` nodes, which have the numbers from 0. A node that cannot be reached stays
    /// in the pool; its session is opened in the background.
    ///
    /// # Panics
    /// If `count` is more than [`NODES_MAX`].
    pub fn open(count: usize, open: Arc<Open<S>>) -> Nodes<S> {
        assert!(count <= NODES_MAX, "a pool has at most {NODES_MAX} nodes");
        let ids = || (0..count as u32).map(NodeId);
        let first: Vec<Result<S, String>> = std::thread::scope(|scope| {
            let opened = ids().map(|node| {
                scope.spawn({
                    let open = &open;
                    move || open(node)
                })
            });
            // Collected first, so that all attempts run at the same time.
            let opened: Vec<_> = opened.collect();
            opened
                .into_iter()
                .map(|opened| opened.join().expect("opening a session does not panic"))
                .collect()
        });
        let members = ids().zip(first).map(|(node, opened)| Member::new(node, opened)).collect();
        let nodes = Nodes {
            members,
            live: RefCell::default(),
            open,
            driver: RefCell::default(),
            waiting: Cell::new(Waiting::Briefly),
            news: News::default(),
            call_timeout: Cell::new(None),
            counted: Cell::default(),
            fenced: Cell::new(0),
        };
        nodes.members.iter().for_each(|member| nodes.ensure_opening(member));
        nodes.list_live();
        nodes
    }

    /// Returns the session with a node. Sessions differ in their keys, so a client that keeps keys compares
    /// [`Nodes::session_number`].
    ///
    /// # Errors
    /// The pool has no such node, or the node cannot be reached now.
    pub fn session(&self, node: NodeId) -> Result<Rc<S>, FabricError> {
        let member = self.member(node)?;
        match &*member.state.borrow() {
            State::Up(session) => Ok(Rc::clone(session)),
            State::Down { reason, .. } => Err(FabricError::Unreachable { node, reason: reason.clone() }),
            State::Fenced => Err(FabricError::Lost { node, ran: Ran::No, reason: FENCED.to_owned() }),
        }
    }

    /// Number of the current or last session with a node, from 1; 0 if there was none.
    pub fn session_number(&self, node: NodeId) -> u64 {
        self.member(node).map_or(0, |member| member.sessions.get())
    }

    /// Number of nodes in the pool, with and without a session.
    pub fn count(&self) -> u32 {
        self.members.len() as u32
    }

    /// Sets how the core waits for the responses of all nodes.
    pub fn set_waiting(&self, waiting: Waiting) {
        self.waiting.set(waiting);
    }

    /// Sets the time after which a call without a response times out, at every node.
    pub fn set_call_timeout(&self, patience: Duration) {
        self.call_timeout.set(Some(patience));
        self.live.borrow().iter().for_each(|session| session.set_call_timeout(patience));
    }

    /// The sum of the counters of all sessions so far.
    pub fn counters(&self) -> Counters {
        let mut sum = self.counted.get();
        self.live.borrow().iter().for_each(|session| sum.add(&session.counters()));
        sum
    }

    /// Drives all sessions under a foreign executor: spawn this future on the same thread and keep it running while the
    /// pool is used. Never completes.
    pub async fn drive(&self) {
        let mut driven: Vec<(Rc<S>, Drive)> = Vec::new();
        std::future::poll_fn(|cx| {
            *self.driver.borrow_mut() = Some(cx.waker().clone());
            self.replace_sessions();
            let live = self.live.borrow().clone();
            driven.retain(|(session, _)| live.iter().any(|other| Rc::ptr_eq(session, other)));
            for session in live {
                if !driven.iter().any(|(other, _)| Rc::ptr_eq(&session, other)) {
                    let own = Rc::clone(&session);
                    driven.push((session, Box::pin(async move { own.drive().await })));
                }
            }
            for (_, drive) in &mut driven {
                let _never_completes = drive.as_mut().poll(cx);
            }
            Poll::<()>::Pending
        })
        .await
    }

    fn member(&self, node: NodeId) -> Result<&Member<S>, FabricError> {
        self.members.get(node.0 as usize).ok_or(FabricError::NoSuchNode(node))
    }

    /// Passes on the outcome of a request that `session` carried. If the session is over, the node gets another.
    fn checked<O>(
        &self,
        node: NodeId,
        session: &Rc<S>,
        outcome: Result<O, FabricError>,
    ) -> Result<O, FabricError> {
        if let Err(error) = &outcome
            && session.is_over()
        {
            self.end(node, session, &error.to_string());
        }
        outcome
    }

    /// Ends `session`, unless its node has another one already.
    #[cold]
    fn end(&self, node: NodeId, session: &Rc<S>, reason: &str) {
        let Ok(member) = self.member(node) else { return };
        let is_current =
            matches!(&*member.state.borrow(), State::Up(current) if Rc::ptr_eq(current, session));
        if is_current {
            let mut counted = self.counted.get();
            counted.add(&session.counters());
            self.counted.set(counted);
            member.state.replace(State::Down { reason: reason.to_owned(), opening: None });
            self.ensure_opening(member);
            self.list_live();
        }
    }

    /// Starts a thread that opens a session, if the node has neither a session nor such a thread.
    fn ensure_opening(&self, member: &Member<S>) {
        if let State::Down { opening: opening @ None, .. } = &mut *member.state.borrow_mut() {
            let driver = self.driver.borrow().clone();
            let mut bindings = member.bindings.borrow().clone();
            if mutants::REOPENED_UNBOUND.is_on() {
                bindings.clear();
            }
            *opening =
                Opening::start(member.node, Arc::clone(&self.open), bindings, driver, Arc::clone(&self.news));
        }
    }

    /// Ends the sessions that are over, and adopts those that were opened in the background.
    fn replace_sessions(&self) {
        let over: Vec<Rc<S>> =
            self.live.borrow().iter().filter(|session| session.is_over()).map(Rc::clone).collect();
        for session in over {
            let of = |member: &&Member<S>| matches!(&*member.state.borrow(), State::Up(up) if Rc::ptr_eq(up, &session));
            if let Some(member) = self.members.iter().find(of) {
                self.end(member.node, &session, "its session is over");
            }
        }
        if self.is_complete() {
            return;
        }
        for member in &self.members {
            self.ensure_opening(member);
            if let Some(session) = member.adopt()
                && let Some(patience) = self.call_timeout.get()
            {
                session.set_call_timeout(patience);
            }
        }
        let is_fenced = |member: &&Member<S>| matches!(&*member.state.borrow(), State::Fenced);
        self.fenced.set(self.members.iter().filter(is_fenced).count());
        self.list_live();
    }

    /// Whether every node has a session, except those that will have none.
    fn is_complete(&self) -> bool {
        self.live.borrow().len() + self.fenced.get() == self.members.len()
    }

    /// Notes a binding that the node has answered over `session`, so that further sessions are bound, too.
    ///
    /// # Errors
    /// The node has another session by now, which is not bound.
    fn note_binding(&self, node: NodeId, session: &Rc<S>, binding: Binding) -> Result<(), FabricError> {
        let member = self.member(node)?;
        if !matches!(&*member.state.borrow(), State::Up(current) if Rc::ptr_eq(current, session)) {
            let reason = "it ended while it was bound to a client".to_owned();
            return Err(FabricError::Lost { node, ran: Ran::Yes, reason });
        }
        let mut bindings = member.bindings.borrow_mut();
        bindings.retain(|other| other.store != binding.store);
        bindings.push(binding);
        Ok(())
    }

    fn list_live(&self) {
        let up = |member: &Member<S>| match &*member.state.borrow() {
            State::Up(session) => Some(Rc::clone(session)),
            State::Down { .. } | State::Fenced => None,
        };
        *self.live.borrow_mut() = self.members.iter().filter_map(up).collect();
    }
}

impl<S: Session> Member<S> {
    fn new(node: NodeId, opened: Result<S, String>) -> Member<S> {
        let member = Member {
            node,
            state: RefCell::new(State::Down { reason: String::new(), opening: None }),
            sessions: Cell::new(0),
            // Until a session says otherwise: every request fails before it needs one of them.
            capabilities: Cell::new(Capabilities::SOFTWARE),
            bindings: RefCell::default(),
        };
        match opened {
            Ok(session) => drop(member.set_up(session)),
            Err(reason) => drop(member.state.replace(State::Down { reason, opening: None })),
        }
        member
    }

    fn set_up(&self, session: S) -> Rc<S> {
        self.capabilities.set(session.capabilities(self.node));
        self.sessions.set(self.sessions.get() + 1);
        let session = Rc::new(session);
        self.state.replace(State::Up(Rc::clone(&session)));
        session
    }

    /// Takes and returns the session that was opened in the background, if there is one; otherwise takes the reason of
    /// the last failure.
    fn adopt(&self) -> Option<Rc<S>> {
        let (opened, is_fenced) = match &mut *self.state.borrow_mut() {
            State::Down { reason, opening: Some(opening) } => {
                let mut progress = opening.progress();
                if let Some(failure) = progress.failure.take() {
                    *reason = failure;
                }
                (progress.opened.take(), progress.is_fenced)
            }
            _ => (None, false),
        };
        if is_fenced {
            self.state.replace(State::Fenced);
        }
        let (session, bindings) = opened?;
        self.bindings.replace(bindings);
        Some(self.set_up(session))
    }
}

impl<S> Drop for Member<S> {
    fn drop(&mut self) {
        if let State::Down { opening: Some(opening), .. } = self.state.get_mut() {
            opening.stop();
        }
    }
}

impl<S: Session> Opening<S> {
    /// Starts the thread. `None` if the system can start no thread now.
    fn start(
        node: NodeId,
        open: Arc<Open<S>>,
        bindings: Vec<Binding>,
        driver: Option<Waker>,
        news: News,
    ) -> Option<Arc<Opening<S>>> {
        let progress = Progress { opened: None, is_fenced: false, failure: None, is_stopped: false, driver };
        let opening = Arc::new(Opening { progress: Mutex::new(progress), stopped: Condvar::new() });
        let shared = Arc::clone(&opening);
        let thread = std::thread::Builder::new().name("farside-reopen".into());
        thread.spawn(move || shared.run(node, &*open, &bindings, &news)).is_ok().then_some(opening)
    }

    fn run(&self, node: NodeId, open: &Open<S>, bindings: &[Binding], news: &AtomicBool) {
        // The seed only has to differ between clients, so that they do not all return at once.
        let mut draws =
            Draws(timer::now().as_nanos() as u64 ^ u64::from(node.0) << 32 ^ u64::from(std::process::id()));
        let mut pause = FIRST_PAUSE;
        loop {
            let outcome = open(node).and_then(|session| {
                let bound = bind(&session, node, bindings);
                bound.map(|bound| bound.map(|bindings| (session, bindings)))
            });
            let mut progress = self.progress();
            if progress.is_stopped {
                return;
            }
            match outcome {
                Ok(bound) => {
                    progress.is_fenced = bound.is_none();
                    progress.opened = bound;
                    let driver = progress.driver.take();
                    drop(progress);
                    news.store(true, Ordering::Release);
                    return driver.into_iter().for_each(Waker::wake);
                }
                Err(reason) => progress.failure = Some(reason),
            }
            let percent = 100 - VARIATION + draws.below(2 * VARIATION + 1);
            let varied = pause * percent as u32 / 100;
            let waited = self.stopped.wait_timeout_while(progress, varied, |progress| !progress.is_stopped);
            if waited.unwrap_or_else(PoisonError::into_inner).0.is_stopped {
                return;
            }
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }
}

/// Binds a new session as the sessions before it were bound. Returns the bindings that the session has; `None` if the
/// node has fenced this client.
///
/// # Errors
/// The node does not answer: the session is of no use.
fn bind<S: Session>(session: &S, node: NodeId, bindings: &[Binding]) -> Result<Option<Vec<Binding>>, String> {
    let (mut bound, mut answer) = (Vec::new(), Vec::new());
    for binding in bindings {
        match block_on(session, session.call(node, ServiceId::NODE, &binding.request, &mut answer)) {
            Ok(()) => bound.push(binding.clone()),
            Err(error) if error.is_fenced() => return Ok(None),
            Err(error @ FabricError::Refused(_)) => {
                let name = binding.store.0.clone();
                let open = serde_json::to_vec(&Ask::OpenStore { name }).expect("plain data");
                let opened = block_on(session, session.call(node, ServiceId::NODE, &open, &mut answer));
                let is_same = |store: &Store| store.id == binding.store.1;
                match opened.map(|()| serde_json::from_slice(&answer)) {
                    // The store was dropped or replaced, or this client has lost all rights to it. So no chain of this
                    // session runs in that store, and the binding is void.
                    Err(FabricError::Refused(_)) => {}
                    Ok(Ok(Answer::Store(store))) if !is_same(&store) => {}
                    _ => return Err(error.to_string()),
                }
            }
            Err(error) => return Err(error.to_string()),
        }
    }
    Ok(Some(bound))
}

impl<S> Opening<S> {
    fn progress(&self) -> MutexGuard<'_, Progress<S>> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stops the thread, at the latest when its current attempt ends.
    fn stop(&self) {
        self.progress().is_stopped = true;
        self.stopped.notify_one();
    }
}

impl<S: Session> Fabric for Nodes<S> {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        let session = self.session(node)?;
        let ran = session.run(node, chain, reply).await;
        self.checked(node, &session, ran)
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        let session = self.session(node)?;
        let called = session.call(node, service, request, answer).await;
        self.checked(node, &session, called)?;
        match Binding::of(service, request) {
            Some(binding) => self.note_binding(node, &session, binding),
            None => Ok(()),
        }
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        // Without a session there is nothing to do: the node frees what an ended session has allocated.
        if let Ok(session) = self.session(node) {
            session.retire(node, key, buffer);
        }
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.member(node).map_or(Capabilities::NONE, |member| member.capabilities.get())
    }

    fn session_number(&self, node: NodeId) -> u64 {
        Nodes::session_number(self, node)
    }

    fn may_run_abandoned(&self, node: NodeId) -> bool {
        self.session(node).map_or(true, |session| session.may_run_abandoned(node))
    }
}

impl<S: Session> Turns for Nodes<S> {
    fn end_turn(&self) {
        self.live.borrow().iter().for_each(|session| session.end_turn());
        // Cheap, since the tasks of the surviving nodes make many turns while a node is down.
        if !self.is_complete() && self.news.swap(false, Ordering::Acquire) {
            self.replace_sessions();
        }
    }

    fn wait(&self, core: &Idle<'_>) {
        let at_most = if self.is_complete() { SLEEP_MAX } else { SLEEP_WHILE_OPENING };
        wait(self.live.borrow().iter().map(|session| &**session), self.waiting.get(), Some(at_most), core);
        self.replace_sessions();
    }
}

impl<S: Session> Clock for Nodes<S> {
    fn now(&self) -> Duration {
        timer::now()
    }

    fn wall(&self) -> Duration {
        timer::wall()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        timer::sleep(duration)
    }
}
