//! The common part of the fabrics `local` and `shm`: the caller's own CPU runs the chain on the node's memory.
//!
//! The session's slot in the node's memory says whether the session may hold pointers: its *turn* number is odd from
//! the first chain of a turn until every task that ran a chain has reached its next await.
//!
//! Invariant: the turn number is odd before a chain's first access, and all processes can see that. It stays odd until
//! the buffers that the chain made unreachable are on the session's list of retired buffers.
//! Invariant: a turn in which the session is found fenced ends without a chain. The session is not over then, so a pool
//! opens no other one in its place, which would not be fenced.

use crate::executor::{self, Idle, Turns};
use crate::memory::Mapping;
use crate::mutants;
use crate::nodes::Session;
use crate::runner::{Runner, Runs};
use crate::spin::Waiting;
use crate::timer;
use crate::wait::{Waits, Wakeup, wait};
use farside_remote::arena::session::{Counters, SessionId};
use farside_remote::clock::Clock;
use farside_remote::fabric::{DEADLINE, FENCED, Ran, ServiceId};
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use std::cell::{Cell, RefCell};
use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;
use std::time::Duration;

/// A session's two-sided channel to the node, for calls and wake-ups.
pub trait Control: Send {
    /// Calls a service; the response replaces the content of `answer`.
    fn call<'a>(
        &'a self,
        service: ServiceId,
        request: &'a [u8],
        answer: &'a mut Vec<u8>,
    ) -> Pin<Box<dyn Future<Output = Result<(), FabricError>> + 'a>>;

    /// Wakes the node if it sleeps. Called when a chain needs memory, or when many buffers were retired.
    fn ring(&self);

    /// Whether a response is outstanding that [`Control::poll`] finds.
    fn is_waiting(&self) -> bool {
        false
    }

    /// Passes the responses that have arrived to their callers. Returns false if there were none.
    fn poll(&self) -> bool {
        false
    }

    /// Called when polling ends. From then on a response wakes its caller without being polled for.
    fn end_polling(&self) {}
}

/// An endpoint whose chains run on the caller's own CPU. Belongs to one thread.
pub struct Direct<M: Runs = Arc<Mapping>> {
    runner: Runner<M>,
    control: Box<dyn Control>,
    /// Set when the node's process is found dead.
    died: Arc<AtomicBool>,
    node: NodeId,
    driver: RefCell<Option<Waker>>,
    patience: Cell<Duration>,
}

impl<M: Runs> Direct<M> {
    /// Creates the endpoint of a session that the node has opened on `memory`.
    pub fn new(
        memory: M,
        control: Box<dyn Control>,
        died: Arc<AtomicBool>,
        node: NodeId,
        session: SessionId,
    ) -> Direct<M> {
        Direct {
            runner: Runner::new(memory, session),
            control,
            died,
            node,
            driver: RefCell::new(None),
            patience: Cell::new(DEADLINE),
        }
    }

    /// Returns the node's memory.
    pub fn memory(&self) -> &M {
        self.runner.memory()
    }

    /// Returns the session's identifier.
    pub fn session(&self) -> SessionId {
        self.runner.session()
    }

    /// Sets the time limit of calls to services, in place of [`DEADLINE`].
    pub fn set_call_timeout(&self, patience: Duration) {
        self.patience.set(patience);
    }

    /// Returns the counters of this session.
    pub fn counters(&self) -> Counters {
        self.runner.counters()
    }

    /// Ends the session's turns under executors other than [`executor::Core`]. Spawn this future on the tasks' thread,
    /// and keep it running while the endpoint is used. Otherwise the session still appears to run chains after its last
    /// one, which delays the reuse of buffers that other sessions retire. Never completes.
    pub async fn drive(&self) {
        std::future::poll_fn(|cx| {
            self.end_turn();
            *self.driver.borrow_mut() = Some(cx.waker().clone());
            std::task::Poll::Pending
        })
        .await
    }

    /// First part of [`Fabric::run`] if the thread has other tasks: queues hints of the memory that the chain will
    /// touch, and returns their number. The caller then yields.
    #[inline]
    pub fn expect(&self, chain: &Chain<'_>) -> usize {
        self.runner.expect(chain.view())
    }

    /// Second part of [`Fabric::run`], after [`Direct::expect`], which returned `hints`, and the yield.
    #[inline]
    pub fn proceed(&self, hints: usize) {
        self.runner.proceed(hints);
    }

    /// Last part of [`Fabric::run`]: runs the chain. This function is inlined into each async function that calls it,
    /// since the compiler inlines an async function only if it has one caller.
    ///
    /// # Errors
    /// Those of [`Fabric::run`].
    #[inline(always)]
    pub fn run_now(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        self.check(node)?;
        self.enter()?;
        chain.note_posted();
        self.runner.run(self.session().number, chain.view(), reply);
        if self.runner.should_ring(reply) {
            self.control.ring();
        }
        Ok(())
    }

    #[inline]
    fn check(&self, node: NodeId) -> Result<(), FabricError> {
        if node != self.node {
            return Err(FabricError::NoSuchNode(node));
        }
        if self.died.load(Ordering::Relaxed) {
            return Err(FabricError::NodeDied(node));
        }
        Ok(())
    }

    /// Announces, before a chain runs, that this session may hold pointers from now on.
    ///
    /// # Errors
    /// The session is fenced, so no chain may run.
    #[inline(always)]
    fn enter(&self) -> Result<(), FabricError> {
        let was_fenced = mutants::FENCED_READ_TOO_EARLY.is_on() && self.runner.is_fenced();
        if !self.runner.enter() {
            return Ok(());
        }
        if was_fenced || !mutants::FENCED_READ_TOO_EARLY.is_on() && self.runner.is_fenced() {
            return Err(self.leave_fenced());
        }
        let driver = self.driver.borrow().clone(); // Cloned: `wake` may run code that borrows it.
        if let Some(driver) = driver {
            driver.wake();
        }
        Ok(())
    }

    #[cold]
    fn leave_fenced(&self) -> FabricError {
        self.runner.end_turn();
        FabricError::Lost { node: self.node, ran: Ran::No, reason: FENCED.to_owned() }
    }
}

impl<M: Runs> Turns for Direct<M> {
    #[inline]
    fn end_turn(&self) {
        self.runner.fetch_ahead();
        self.runner.end_turn();
    }

    fn wait(&self, core: &Idle<'_>) {
        wait(std::iter::once(self), Waiting::Briefly, None, core);
    }
}

impl<M: Runs> Waits for Direct<M> {
    fn is_waiting(&self) -> bool {
        self.control.is_waiting()
    }

    fn poll(&self) -> bool {
        self.control.is_waiting() && self.control.poll()
    }

    fn end_wait(&self, _: Wakeup) {
        self.control.end_polling();
    }

    fn may_sleep(&self) -> bool {
        self.control.end_polling();
        true
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn sleep_max(&self, _: Duration) -> Option<Duration> {
        None
    }
}

impl<M: Runs> Fabric for Direct<M> {
    #[inline]
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        if executor::in_company() {
            let hints = self.expect(chain);
            executor::yield_now().await;
            self.proceed(hints);
        }
        self.run_now(node, chain, reply)
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        self.check(node)?;
        // Before a call, the turn must end: a node in this process runs the call before this task continues, and may
        // wait for the end of all turns. The turn may end: tasks that ran chains have used the results before their
        // next await.
        self.runner.end_turn();
        if service != ServiceId::NODE {
            self.enter()?; // On `local`, this thread runs the service, which follows pointers.
        }
        let called = timer::within(self.patience.get(), self.control.call(service, request, answer)).await;
        called.unwrap_or(Err(FabricError::Deadline { node, waited: self.patience.get() }))
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        if self.check(node).is_err() {
            return; // The memory is unmapped, or belongs to another node.
        }
        // The turn protects the buffer until it is on the list of retired buffers. Without a turn, the store could be
        // dropped before, and its segments be reused by another store.
        if self.enter().is_err() {
            return; // The session is fenced: a scan finds its buffers.
        }
        self.runner.retire(self.session().number, key.region(), buffer);
        if self.runner.is_much_retired() {
            self.control.ring();
        }
    }

    fn capabilities(&self, _node: NodeId) -> Capabilities {
        Capabilities::SOFTWARE
    }

    fn may_run_abandoned(&self, _node: NodeId) -> bool {
        false // A chain runs within one poll of its future.
    }
}

impl<M: Runs + Send + 'static> Session for Direct<M> {
    fn is_over(&self) -> bool {
        self.died.load(Ordering::Relaxed)
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

impl<M: Runs> Clock for Direct<M> {
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

impl<M: Runs> Drop for Direct<M> {
    fn drop(&mut self) {
        self.end_turn();
    }
}
