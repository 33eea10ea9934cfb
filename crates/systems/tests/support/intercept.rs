//! A fabric that runs a function before each chain, and can stop or refuse the chain, or lose its reply.

use farside_remote::clock::Clock;
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::wire::Code;
use farside_remote::{Addr, Capabilities, Chain, ChainBuf, Fabric, FabricError, Key, NodeId, Reply, read};
use std::cell::{Cell, RefCell};
use std::time::Duration;

/// Fate of a chain, which [`Intercept`] determines before the chain runs.
pub(crate) enum Then {
    Runs,
    /// The chain never runs, and its future is never ready.
    Stops,
    /// The reply is lost, and the error states whether the chain ran. The chain runs only for [`Ran::Yes`].
    Lost(Ran),
}

/// A fabric that calls a function before each chain to determine the chain's fate.
pub(crate) struct Intercept<'a, F> {
    inner: F,
    before: RefCell<Box<dyn FnMut() -> Then + 'a>>,
    is_stuck: Cell<bool>,
    instead: RefCell<Option<Instead<'a>>>,
    before_write: RefCell<Option<Box<dyn FnOnce() + 'a>>>,
    of_write: RefCell<Option<Then>>,
    refuses: RefCell<Box<dyn FnMut() -> bool + 'a>>,
    before_call: RefCell<Box<dyn FnMut() + 'a>>,
    stops_call: RefCell<Box<dyn FnMut() -> bool + 'a>>,
    /// Whether the answer of the next call is lost, and its future never ready.
    loses_answer: Cell<bool>,
    may_run_abandoned: Cell<bool>,
    has_stopped_sleeps: Cell<bool>,
}

/// Function that replaces a chain.
type Instead<'a> = Box<dyn FnOnce(&Chain<'_>) + 'a>;

impl<'a, F> Intercept<'a, F> {
    pub(crate) fn new(inner: F) -> Intercept<'a, F> {
        Intercept {
            inner,
            before: RefCell::new(Box::new(|| Then::Runs)),
            is_stuck: Cell::new(false),
            instead: RefCell::new(None),
            before_write: RefCell::new(None),
            of_write: RefCell::new(None),
            refuses: RefCell::new(Box::new(|| false)),
            before_call: RefCell::new(Box::new(|| ())),
            stops_call: RefCell::new(Box::new(|| false)),
            loses_answer: Cell::new(false),
            may_run_abandoned: Cell::new(false),
            has_stopped_sleeps: Cell::new(false),
        }
    }

    /// Lets no sleep end from now on. The client's task then renews no lease and frees no memory, so that a test counts
    /// the chains of operations alone, however slowly it runs.
    pub(crate) fn stop_sleeps(&self) {
        self.has_stopped_sleeps.set(true);
    }

    /// Calls `before` before each chain from now on.
    pub(crate) fn before_each(&self, before: impl FnMut() -> Then + 'a) {
        *self.before.borrow_mut() = Box::new(before);
    }

    /// Calls `before` before each call from now on.
    pub(crate) fn before_each_call(&self, before: impl FnMut() + 'a) {
        *self.before_call.borrow_mut() = Box::new(before);
    }

    /// Stops each call from now on for which `stops` returns true. Its future is never ready.
    pub(crate) fn stop_calls_if(&self, stops: impl FnMut() -> bool + 'a) {
        *self.stops_call.borrow_mut() = Box::new(stops);
    }

    /// Lets the next call run. Its future is never ready.
    pub(crate) fn lose_next_answer(&self) {
        self.loses_answer.set(true);
    }

    /// Sets whether chains may still run whose futures were dropped, beside what the fabric below says.
    pub(crate) fn set_may_run_abandoned(&self, may: bool) {
        self.may_run_abandoned.set(may);
    }

    /// Lets `chains` chains run, then calls `act` once before the next chain.
    pub(crate) fn before_chain(&self, chains: u32, act: impl FnOnce() + 'a) {
        let (mut left, mut act) = (chains, Some(act));
        self.before_each(move || {
            match left.checked_sub(1) {
                Some(fewer) => left = fewer,
                None => act.take().into_iter().for_each(|act| act()),
            }
            Then::Runs
        });
    }

    /// Lets `chains` chains run, then applies `then` to the next chain. All later chains run.
    pub(crate) fn of_chain(&self, chains: u32, then: Then) {
        let (mut left, mut then) = (chains, Some(then));
        self.before_each(move || match left.checked_sub(1) {
            Some(fewer) => {
                left = fewer;
                Then::Runs
            }
            None => then.take().unwrap_or(Then::Runs),
        });
    }

    /// Calls `instead` in place of the next chain that has a WRITE. That chain's future is never ready.
    pub(crate) fn instead_of_write(&self, instead: impl FnOnce(&Chain<'_>) + 'a) {
        *self.instead.borrow_mut() = Some(Box::new(instead));
    }

    /// Calls `act` before the next chain that has a WRITE.
    pub(crate) fn before_write(&self, act: impl FnOnce() + 'a) {
        *self.before_write.borrow_mut() = Some(Box::new(act));
    }

    /// Applies `then` to the next chain that has a WRITE.
    pub(crate) fn of_write(&self, then: Then) {
        *self.of_write.borrow_mut() = Some(then);
    }

    /// Lets the node refuse each chain from now on for which `refuses` returns true. None of its ops runs.
    pub(crate) fn refuse_if(&self, refuses: impl FnMut() -> bool + 'a) {
        *self.refuses.borrow_mut() = Box::new(refuses);
    }

    /// Whether a chain was stopped.
    pub(crate) fn is_stuck(&self) -> bool {
        self.is_stuck.get()
    }

    /// Forgets that a chain was stopped. Its future stays pending.
    pub(crate) fn forget_stop(&self) {
        self.is_stuck.set(false);
    }

    pub(crate) fn inner(&self) -> &F {
        &self.inner
    }
}

impl<F: Fabric> Fabric for Intercept<'_, F> {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        let is_refused = (self.refuses.borrow_mut())();
        if is_refused {
            let mut buffer = ChainBuf::new();
            let mut refused = buffer.begin(Key::new(0, 0));
            chain.view().ops().for_each(|_| _ = refused.also(read(Addr::new(0), 8)));
            return self.inner.run(node, &refused, reply).await;
        }
        let mut then = (self.before.borrow_mut())();
        if chain.view().ops().any(|op| op.code() == Code::Write) {
            let instead = self.instead.take();
            if let Some(instead) = instead {
                self.is_stuck.set(true);
                instead(chain);
                return std::future::pending().await;
            }
            let before = self.before_write.take();
            before.into_iter().for_each(|act| act());
            then = self.of_write.take().unwrap_or(then);
        }
        match then {
            Then::Runs => self.inner.run(node, chain, reply).await,
            Then::Stops => {
                self.is_stuck.set(true);
                std::future::pending().await
            }
            Then::Lost(ran) => {
                if ran == Ran::Yes {
                    self.inner.run(node, chain, reply).await?;
                }
                Err(FabricError::Lost { node, ran, reason: "the reply was lost".into() })
            }
        }
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        (self.before_call.borrow_mut())();
        let is_stopped = (self.stops_call.borrow_mut())();
        if is_stopped {
            self.is_stuck.set(true);
            return std::future::pending().await;
        }
        let called = self.inner.call(node, service, request, answer).await;
        if self.loses_answer.take() {
            self.is_stuck.set(true);
            return std::future::pending().await;
        }
        called
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.inner.retire(node, key, buffer);
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.inner.capabilities(node)
    }

    fn may_run_abandoned(&self, node: NodeId) -> bool {
        self.may_run_abandoned.get() || self.inner.may_run_abandoned(node)
    }
}

impl<F: Clock> Clock for Intercept<'_, F> {
    fn now(&self) -> Duration {
        self.inner.now()
    }

    fn wall(&self) -> Duration {
        self.inner.wall()
    }

    async fn sleep(&self, duration: Duration) {
        self.inner.sleep(duration).await;
        if self.has_stopped_sleeps.get() {
            std::future::pending().await
        }
    }
}
