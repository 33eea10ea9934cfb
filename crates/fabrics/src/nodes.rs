//! A pool of nodes as one fabric: one session per node, all on one client core.
//!
//! The core polls and sleeps on all sessions together. When a session is over, requests to its node fail at once, and a
//! thread opens another session, with growing and randomly varied pauses between attempts, so that no task waits for
//! it. Requests go to the new session from the end of the round in which it was opened.
//!
//! Invariant: a request is sent over one session only. It is never repeated over the next one.
//! Invariant: the end of one node's session changes nothing for requests to other nodes.

use crate::executor::{FDS_MAX, Idle, Turns};
use crate::spin::Waiting;
use crate::timer;
use crate::wait::{Waits, wait};
use farside_remote::arena::session::Counters;
use farside_remote::clock::Clock;
use farside_remote::draws::Draws;
use farside_remote::fabric::ServiceId;
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
}

/// A node of the pool.
struct Member<S> {
    node: NodeId,
    state: RefCell<State<S>>,
    /// Number of sessions with the node so far.
    sessions: Cell<u64>,
    /// Capabilities of the last session.
    capabilities: Cell<Capabilities>,
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
}

/// The future that drives a session.
type Drive = Pin<Box<dyn Future<Output = ()>>>;

/// What the pool and the thread that opens a session share.
struct Opening<S> {
    progress: Mutex<Progress<S>>,
    stopped: Condvar,
}

struct Progress<S> {
    opened: Option<S>,
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
            *opening = Opening::start(member.node, Arc::clone(&self.open), driver, Arc::clone(&self.news));
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
        self.list_live();
    }

    /// Whether every node has a session.
    fn is_complete(&self) -> bool {
        self.live.borrow().len() == self.members.len()
    }

    fn list_live(&self) {
        let up = |member: &Member<S>| match &*member.state.borrow() {
            State::Up(session) => Some(Rc::clone(session)),
            State::Down { .. } => None,
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
        let opened = match &mut *self.state.borrow_mut() {
            State::Down { reason, opening: Some(opening) } => {
                let mut progress = opening.progress();
                if let Some(failure) = progress.failure.take() {
                    *reason = failure;
                }
                progress.opened.take()
            }
            _ => None,
        };
        opened.map(|session| self.set_up(session))
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
    fn start(node: NodeId, open: Arc<Open<S>>, driver: Option<Waker>, news: News) -> Option<Arc<Opening<S>>> {
        let progress = Progress { opened: None, failure: None, is_stopped: false, driver };
        let opening = Arc::new(Opening { progress: Mutex::new(progress), stopped: Condvar::new() });
        let shared = Arc::clone(&opening);
        let thread = std::thread::Builder::new().name("farside-reopen".into());
        thread.spawn(move || shared.run(node, &*open, &news)).is_ok().then_some(opening)
    }

    fn run(&self, node: NodeId, open: &Open<S>, news: &AtomicBool) {
        // The seed only has to differ between clients, so that they do not all return at once.
        let mut draws =
            Draws(timer::now().as_nanos() as u64 ^ u64::from(node.0) << 32 ^ u64::from(std::process::id()));
        let mut pause = FIRST_PAUSE;
        loop {
            let outcome = open(node);
            let mut progress = self.progress();
            if progress.is_stopped {
                return;
            }
            match outcome {
                Ok(session) => {
                    progress.opened = Some(session);
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
        self.checked(node, &session, called)
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
        let at_most = (!self.is_complete()).then_some(SLEEP_WHILE_OPENING);
        wait(self.live.borrow().iter().map(|session| &**session), self.waiting.get(), at_most, core);
        self.replace_sessions();
    }
}

impl<S: Session> Clock for Nodes<S> {
    fn now(&self) -> Duration {
        timer::now()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        timer::sleep(duration)
    }
}
