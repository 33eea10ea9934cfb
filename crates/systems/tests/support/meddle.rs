//! A fabric that lets somebody else act between two requests of one operation.

use farside_remote::clock::Clock;
use farside_remote::fabric::ServiceId;
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use std::cell::{Cell, RefCell};
use std::time::Duration;

type Act = Box<dyn FnOnce()>;

/// Acts once, right before a chain that was chosen; or never lets it run.
pub(crate) struct Meddle<F> {
    inner: F,
    chains_until: Cell<u32>,
    act: RefCell<Option<Act>>,
    stops: Cell<bool>,
}

impl<F> Meddle<F> {
    pub(crate) fn new(inner: F) -> Meddle<F> {
        Meddle { inner, chains_until: Cell::new(0), act: RefCell::new(None), stops: Cell::new(false) }
    }

    /// Has `act` done before the chain after `chains` more.
    pub(crate) fn before_chain(&self, chains: u32, act: impl FnOnce() + 'static) {
        self.chains_until.set(chains);
        *self.act.borrow_mut() = Some(Box::new(act));
    }

    /// The chain after `chains` more never runs, and whoever awaits it waits for ever.
    pub(crate) fn stop_before_chain(&self, chains: u32) {
        self.chains_until.set(chains);
        self.stops.set(true);
    }

    pub(crate) fn inner(&self) -> &F {
        &self.inner
    }
}

impl<F: Fabric> Fabric for Meddle<F> {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        match self.chains_until.get() {
            0 => {
                let act = self.act.borrow_mut().take();
                act.into_iter().for_each(|act| act());
                if self.stops.take() {
                    std::future::pending::<()>().await;
                }
            }
            left => self.chains_until.set(left - 1),
        }
        self.inner.run(node, chain, reply).await
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        self.inner.call(node, service, request, answer).await
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.inner.retire(node, key, buffer);
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.inner.capabilities(node)
    }
}

impl<F: Clock> Clock for Meddle<F> {
    fn now(&self) -> Duration {
        self.inner.now()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        self.inner.sleep(duration)
    }
}
