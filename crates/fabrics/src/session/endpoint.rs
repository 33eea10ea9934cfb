//! The client's end of a session over a real line: tasks send requests ([`TaskSession`]), a carrier's line moves them,
//! and the node's engine runs them.
//!
//! All requests that tasks make in one round of the core ([`crate::executor`]) leave together when the round ends. If
//! no task is ready, the endpoint polls for responses for a short while, then sleeps.
//!
//! Invariant: the core sleeps only if the line's descriptor or a timer will wake it.

use super::carrier::{Arrivals, Broken, Line};
use super::client::{Client, Config, Event, Granted};
use super::tasks::TaskSession;
use crate::executor::{Idle, Turns};
use crate::nodes::Session;
use crate::reactor::Watch;
use crate::spin::{SPIN, Waiting};
use crate::timer::{self, System};
use crate::wait::{Waits, Wakeup, wait};
use farside_remote::arena::session::Counters;
use farside_remote::clock::Clock;
use farside_remote::fabric::ServiceId;
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use rustix::event::{PollFd, PollFlags, poll};
use std::cell::Cell;
use std::os::fd::BorrowedFd;
use std::task::Waker;
use std::time::Duration;

/// Time limit for sending hellos until a response arrives.
const GREETING_WAIT: Duration = Duration::from_millis(900);
/// Time that a dropped endpoint waits for the node's last responses, including those to retires.
const FAREWELL_WAIT: Duration = Duration::from_millis(100);

/// Reason why a session could not be opened. No request was sent to the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpenError {
    /// The node did not respond in time.
    Silent,
    /// The node refused the session; the text gives the reason.
    Refused(String),
    /// The carrier is broken.
    Broken(Broken),
}

impl std::fmt::Display for OpenError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            OpenError::Silent => write!(
                f,
                "no node answered within {} ms: check that one is running there and is not stopped",
                GREETING_WAIT.as_millis()
            ),
            OpenError::Refused(reason) => write!(f, "the node refuses: {reason}"),
            OpenError::Broken(Broken(reason)) => {
                write!(f, "no node can be reached: {reason}; check that one is running there")
            }
        }
    }
}

impl std::error::Error for OpenError {}

/// A session with one engine, as a fabric. Belongs to one thread.
pub struct Endpoint<L: Line> {
    tasks: TaskSession<L, System>,
    granted: Granted,
    waiting_as: Cell<Waiting>,
    /// Whether the core has waited since its last round ended. Waiting includes polling for responses.
    has_waited: Cell<bool>,
}

impl<L: Line> Endpoint<L> {
    /// Opens a session over `line`. The properties of `line` replace those in `config`. Waits at most about 1 s.
    ///
    /// # Errors
    /// [`OpenError`] says why there is no session; no session is left behind.
    pub fn open(line: L, node: NodeId, config: Config) -> Result<Endpoint<L>, OpenError> {
        let now = timer::now();
        let mut client = Client::new(
            now,
            Config {
                datagram: line.datagram_max(),
                inbound_bytes: line.inbound_bytes(),
                is_reliable: L::IS_RELIABLE,
                ..config
            },
        );
        let granted = greet(&line, &mut client, now + GREETING_WAIT)?;
        Ok(Endpoint {
            tasks: TaskSession::new(line, System, node, client, Some(granted)),
            granted,
            waiting_as: Cell::default(),
            has_waited: Cell::new(true),
        })
    }

    /// The session without its waiting.
    #[cfg(feature = "verbs")]
    pub(crate) fn tasks(&self) -> &TaskSession<L, System> {
        &self.tasks
    }

    /// Returns the node's grants.
    pub fn granted(&self) -> Granted {
        self.granted
    }

    /// Sets the time limit of calls, in place of [`farside_remote::fabric::DEADLINE`].
    pub fn set_call_timeout(&self, patience: Duration) {
        self.tasks.patience.set(patience);
    }

    /// Sets how this end waits for responses under [`crate::executor::Core`].
    pub fn set_waiting(&self, waiting: Waiting) {
        self.waiting_as.set(waiting);
    }

    /// Returns the counters of this session.
    pub fn counters(&self) -> Counters {
        self.tasks.counters()
    }

    /// Returns the traffic counters of the line.
    pub fn traffic(&self) -> super::Counters {
        *self.tasks.state.borrow().client.counters()
    }

    /// Sends, receives and handles timers under executors other than [`crate::executor::Core`]. Spawn this future on
    /// the tasks' thread, and keep it running while the endpoint is used. Never completes.
    ///
    /// # Panics
    /// If the system has no descriptor or thread for this future.
    pub async fn drive(&self) {
        let line = &self.tasks.line;
        let watch = Watch::new(line.fd()).expect("the system watches one more descriptor");
        self.tasks.drive(&Readable { watch, line }, SPIN).await;
    }
}

/// Arrivals at a line with a descriptor.
struct Readable<'a, L> {
    watch: Watch<'a>,
    line: &'a L,
}

impl<L: Line> Arrivals for Readable<'_, L> {
    fn arm(&self, waker: &Waker) {
        self.watch.arm(waker);
        if !self.line.may_sleep() {
            waker.wake_by_ref();
        }
    }

    fn sleep_max(&self) -> Option<Duration> {
        self.line.sleep_max()
    }
}

/// Sends hellos until a response arrives.
fn greet(line: &impl Line, client: &mut Client, until: Duration) -> Result<Granted, OpenError> {
    let mut out = Vec::new();
    loop {
        let now = timer::now();
        while client.transmit(now, &mut out) {
            line.send(&out).and_then(|()| line.flush()).map_err(OpenError::Broken)?;
        }
        let received = line.receive(|bytes| {
            let _refused_is_counted = client.receive(now, bytes);
        });
        received.map_err(OpenError::Broken)?;
        match client.next_event() {
            Some(Event::Open(granted)) => return Ok(granted),
            Some(Event::Refused(reason)) => return Err(OpenError::Refused(reason)),
            Some(_) => return Err(OpenError::Silent),
            None => {}
        }
        if now >= until {
            return Err(OpenError::Silent);
        }
        if line.may_sleep() {
            let wake_at = client.next_timeout().map_or(until, |at| at.min(until));
            let wait = wake_at.saturating_sub(timer::now());
            let wait = line.sleep_max().map_or(wait, |most| most.min(wait));
            let fd = line.fd();
            // Even if interrupted: the loop polls again.
            let _looked_at_anyway =
                poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&timer::timespec(wait)));
        }
    }
}

impl<L: Line> Fabric for Endpoint<L> {
    #[inline]
    fn run(
        &self,
        node: NodeId,
        chain: &Chain<'_>,
        reply: &mut Reply,
    ) -> impl Future<Output = Result<(), FabricError>> {
        self.tasks.run(node, chain, reply)
    }

    #[inline]
    fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        response: &mut Vec<u8>,
    ) -> impl Future<Output = Result<(), FabricError>> {
        self.tasks.call(node, service, request, response)
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.tasks.retire(node, key, buffer);
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.tasks.capabilities(node)
    }

    fn may_run_abandoned(&self, node: NodeId) -> bool {
        self.tasks.may_run_abandoned(node)
    }
}

impl<L: Line> Turns for Endpoint<L> {
    fn end_turn(&self) {
        // If some task is always ready, the core never waits, so responses must be polled for here.
        if !self.has_waited.replace(false) {
            self.tasks.state.borrow_mut().now = timer::now();
            self.tasks.poll_line();
        }
        self.tasks.send();
        self.tasks.state.borrow_mut().has_time = false;
    }

    fn wait(&self, core: &Idle<'_>) {
        wait(std::iter::once(self), self.waiting_as.get(), None, core);
    }
}

impl<L: Line> Waits for Endpoint<L> {
    fn begin_wait(&self) {
        self.has_waited.set(true);
        self.tasks.state.borrow_mut().has_time = false;
    }

    #[inline]
    fn is_waiting(&self) -> bool {
        self.tasks.state.borrow().client.is_waiting()
    }

    #[inline]
    fn poll(&self) -> bool {
        self.tasks.poll_line()
    }

    fn end_wait(&self, wakeup: Wakeup) {
        let mut state = self.tasks.state.borrow_mut();
        if !std::mem::replace(&mut state.has_time, true) {
            state.now = timer::now();
        }
        drop(state);
        // Received datagrams may have made space to send more. Requests of woken tasks are sent after their round.
        if wakeup != Wakeup::Woken {
            self.tasks.send();
        }
    }

    fn may_sleep(&self) -> bool {
        self.tasks.line.may_sleep()
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.tasks.line.fd())
    }

    fn sleep_max(&self, now: Duration) -> Option<Duration> {
        [self.tasks.timeout(now), self.tasks.line.sleep_max()].into_iter().flatten().min()
    }
}

impl<L: Line + Send + 'static> Session for Endpoint<L> {
    fn is_over(&self) -> bool {
        self.tasks.is_over()
    }

    fn set_call_timeout(&self, patience: Duration) {
        self.set_call_timeout(patience);
    }

    fn counters(&self) -> Counters {
        self.counters()
    }

    async fn drive(&self) {
        self.drive().await;
    }
}

impl<L: Line> Clock for Endpoint<L> {
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

impl<L: Line> Drop for Endpoint<L> {
    fn drop(&mut self) {
        // After a BYE the node does not scan for lost buffers of the session. So before the BYE, wait until the node
        // has received all retires.
        let until = timer::now() + FAREWELL_WAIT;
        loop {
            let now = timer::now();
            self.tasks.state.borrow_mut().now = now;
            self.tasks.send();
            let state = self.tasks.state.borrow();
            if state.over.is_some() || !state.client.is_waiting() || now >= until {
                break;
            }
            drop(state);
            if !self.tasks.poll_line() {
                std::thread::yield_now();
            }
        }
        if self.tasks.leave() {
            self.tasks.send();
        }
    }
}
